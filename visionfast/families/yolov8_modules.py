"""The network as a module: ultralytics rebuilds its blocks, the rest is ours.

ultralytics is AGPL-3.0; it is imported inside functions only, and used for one thing: `parse_model`, which
turns a (checked) configuration into the blocks that the checkpoint's weights belong to.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from visionfast.checkpoint.pickled import printable
from visionfast.errors import CheckpointError, UnsupportedModelError
from visionfast.families.yolov8_config import YoloConfig

__all__ = ["BoxDecode", "YoloGraph", "build_blocks", "level_strides", "load_weights", "shapes_agree"]

Inputs: TypeAlias = tuple[int | tuple[int, ...], ...]
_PROBE_SIZE = 256  # pixels; a multiple of every level's stride
# Every ultralytics model trains with this, not with torch's 1e-5, and a state dict does not carry it.
_BATCH_NORM_EPS = 1e-3


class BoxDecode(nn.Module):
    """From the head's raw outputs to boxes in pixels and scores. Stays FP32 in every graph: FP16's spacing is
    0.5 px at 640.

    The distances to a box's four sides are the expectation over `reg_max` bins (Distribution Focal Loss, Li
    et al., arXiv:2006.04388), in units of the level's stride, from the centre of the anchor's cell. The order
    of the operations is that of the training code, so that both round alike.
    """

    anchors: torch.Tensor  # (1, 2, A) f32: x, y of each cell's centre, in strides
    strides: torch.Tensor  # (1, 1, A) f32: pixels
    bins: torch.Tensor  # (1, reg_max, 1) f32

    def __init__(self, size_hw: tuple[int, int], strides: tuple[int, ...], bins: torch.Tensor) -> None:
        super().__init__()
        centres, steps = [], []
        for stride in strides:
            h, w = size_hw[0] // stride, size_hw[1] // stride
            y, x = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
            centres.append(torch.stack((x.flatten(), y.flatten())))  # (2, h·w)
            steps.append(torch.full((1, h * w), float(stride)))
        self.register_buffer("anchors", torch.cat(centres, 1)[None], persistent=False)
        self.register_buffer("strides", torch.cat(steps, 1)[None], persistent=False)
        self.register_buffer("bins", bins.reshape(1, -1, 1).float().clone(), persistent=False)

    def forward(
        self, distances: torch.Tensor, scores: torch.Tensor, coefficients: torch.Tensor | None = None
    ) -> torch.Tensor:
        """From (B, 4·reg_max, A) and (B, C, A) logits and (B, M, A) coefficients to (B, 4 + C + M, A)."""
        batch, _, anchors = distances.shape
        likelihood = distances.reshape(batch * 4, -1, anchors).softmax(1)  # (B·4, reg_max, A)
        # A convolution, not a weighted sum: it rounds as the training code's does.
        sides = nn.functional.conv1d(likelihood, self.bins)
        sides = sides.view(batch, 4, anchors)  # left, top, right, bottom
        top_left = self.anchors - sides[:, :2]
        bottom_right = self.anchors + sides[:, 2:]
        centre = (top_left + bottom_right) / 2
        boxes = torch.cat((centre, bottom_right - top_left), 1) * self.strides  # (B, 4, A) f32, px
        parts = (boxes, scores.sigmoid()) if coefficients is None else (boxes, scores.sigmoid(), coefficients)
        return torch.cat(parts, 1)


class YoloGraph(nn.Module):
    """Images to predictions: the checkpoint's own convolutions, then `BoxDecode`.

    `images` (B, 3, h, w) float32 → `predictions` (B, 4 + C + M, A) float32, and for segmentation also
    `prototypes` (B, M, h / 4, w / 4) float32.
    """

    def __init__(self, blocks: nn.Sequential, size_hw: tuple[int, int], strides: tuple[int, ...]) -> None:
        super().__init__()
        head: Any = blocks[-1]
        self.blocks = blocks
        self.decode = BoxDecode(size_hw, strides, head.dfl.conv.weight.detach())
        self._inputs = _inputs(blocks)
        self._kept = _kept_outputs(self._inputs)
        self._segments = hasattr(head, "proto")

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        features = list(_features(self.blocks, self._inputs, self._kept, images))
        head: Any = self.blocks[-1]
        distances = _per_anchor(head.cv2, features)
        scores = _per_anchor(head.cv3, features)
        if not self._segments:
            decoded: torch.Tensor = self.decode(distances, scores)
            return decoded
        return self.decode(distances, scores, _per_anchor(head.cv4, features)), head.proto(features[0])


def _inputs(blocks: nn.Sequential) -> Inputs:
    """For each block, which outputs it takes, one or a tuple of several: -1 is the one before."""
    return tuple(b.f if isinstance(b.f, int) else tuple(b.f) for b in cast("Any", blocks))


def _kept_outputs(inputs: Inputs) -> frozenset[int]:
    """Indices of the blocks whose outputs are read again later."""
    kept = set()
    for index, source in enumerate(inputs):
        for i in (source,) if isinstance(source, int) else source:
            if i != -1:
                kept.add(i % index if index else 0)
    return frozenset(kept)


def _features(
    blocks: nn.Sequential,
    inputs: Inputs,
    kept: frozenset[int],
    images: torch.Tensor,
) -> list[torch.Tensor]:
    """What the head is given: one feature map a level, finest first."""
    outputs: list[torch.Tensor | None] = []
    x: Any = images
    for index, block in enumerate(blocks):
        source = inputs[index]
        if isinstance(source, int):
            given: Any = x if source == -1 else outputs[source]
        else:
            given = [x if i == -1 else outputs[i] for i in source]
        if index == len(blocks) - 1:
            features: list[torch.Tensor] = given
            return features
        x = block(given)
        outputs.append(x if index in kept else None)
    raise AssertionError("a network has a head")


def _per_anchor(branches: nn.ModuleList, features: list[torch.Tensor]) -> torch.Tensor:
    """One branch of the head over all levels: (B, channels, A)."""
    return torch.cat([branch(f).flatten(2) for branch, f in zip(branches, features, strict=True)], 2)


# ---- building ---------------------------------------------------------------------------------------------


def build_blocks(config: YoloConfig, source: str) -> nn.Sequential:
    """The configuration's blocks without memory for their weights (`meta` device), in eval mode.

    So a small file that describes a huge network costs nothing before its weights were held against it.
    """
    import copy

    try:
        with _quiet_ultralytics():
            from ultralytics.nn import tasks
            from ultralytics.nn.modules import Conv
    except ImportError as error:
        raise UnsupportedModelError(
            f"{source}: rebuilding a YOLO network needs ultralytics: pip install 'visionfast[build]'"
        ) from error
    default_activation = Conv.default_act
    try:
        with _quiet_ultralytics(), torch.device("meta"):
            parse: Any = tasks.parse_model
            blocks, _saved = parse(copy.deepcopy(dict(config.yaml)), ch=3, verbose=False)
    except Exception as error:  # whatever a made-up architecture provokes
        raise CheckpointError(f"{source}: its architecture cannot be built ({printable(error)})") from error
    finally:
        # Releases before 8.4 leave the class attribute at what a configuration's `activation` made it.
        Conv.default_act = default_activation
    for block in blocks.modules():
        # C2f's second forward, for exporters: one Split, where chunk() traces as a dozen shape computations.
        if hasattr(block, "forward_split"):
            block.forward = block.forward_split
    network: nn.Sequential = blocks.eval()
    return network


@contextlib.contextmanager
def _quiet_ultralytics() -> Iterator[None]:
    """Without the notice about a new settings file, which the first import logs."""
    logger = logging.getLogger("ultralytics")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def shapes_agree(blocks: nn.Sequential, weights: Mapping[str, torch.Tensor]) -> str:
    """Empty when the weights are exactly those that the blocks need, else the first difference in words."""
    expected = {name: tuple(tensor.shape) for name, tensor in blocks.state_dict().items()}
    for name, shape in expected.items():
        if name not in weights:
            # Old files have no counter of the batches that batch norm has seen.
            if name.endswith("num_batches_tracked"):
                continue
            return f"{name} is missing"
        if tuple(weights[name].shape) != shape:
            return f"{name} has shape {tuple(weights[name].shape)}, expected {shape}"
    unexpected = [name for name in weights if name not in expected]
    return f"{unexpected[0]} does not belong to it" if unexpected else ""


def without_batch_norm(blocks: nn.Sequential, weights: Mapping[str, torch.Tensor]) -> nn.Sequential:
    """The blocks, without batch norm where the weights have it folded into the convolution already."""
    for name, block in blocks.named_modules():
        conv = getattr(block, "conv", None)
        if isinstance(conv, nn.Conv2d) and f"{name}.conv.bias" in weights and f"{name}.bn.weight" not in weights:
            conv.bias = nn.Parameter(torch.empty(conv.out_channels, device="meta"))
            block.bn = nn.Identity()
    return blocks


def load_weights(blocks: nn.Sequential, weights: Mapping[str, torch.Tensor], eps: float = _BATCH_NORM_EPS) -> None:
    """Gives the blocks their weights in FP32 and folds batch norm into the convolutions.

    The folded network is the reference, in FP32, that every engine is held against: ultralytics folds before it
    predicts, too. `shapes_agree` comes first: all names must match.
    """
    full = {
        name: weights[name].float() if name in weights else torch.zeros((), dtype=torch.long)
        for name in blocks.state_dict()
    }
    blocks.load_state_dict(full, strict=True, assign=True)
    for block in list(blocks.modules()):
        norm, conv = getattr(block, "bn", None), getattr(block, "conv", None)
        if isinstance(norm, nn.BatchNorm2d) and isinstance(conv, nn.Conv2d):
            norm.eps = eps
            block.conv = nn.utils.fuse_conv_bn_eval(conv, norm)
            block.bn = nn.Identity()
    blocks.requires_grad_(False)


def level_strides(blocks: nn.Sequential, source: str) -> tuple[int, ...]:
    """Pixels for each detection level, measured on a probe without memory, as training does."""
    inputs = _inputs(blocks)
    try:
        with torch.no_grad():
            probe = torch.empty(1, 3, _PROBE_SIZE, _PROBE_SIZE, device="meta")
            features = _features(blocks, inputs, _kept_outputs(inputs), probe)
        sizes = [tuple(f.shape[-2:]) for f in features]
    except Exception as error:  # whatever a made-up architecture provokes
        raise CheckpointError(f"{source}: its layers do not fit together ({printable(error)})") from error
    strides = tuple(_PROBE_SIZE // max(h, 1) for h, _ in sizes)
    if any((h * s, w * s) != (_PROBE_SIZE, _PROBE_SIZE) for (h, w), s in zip(sizes, strides, strict=True)):
        raise CheckpointError(f"{source}: its levels' sizes {sizes} are not whole fractions of {_PROBE_SIZE}")
    return strides
