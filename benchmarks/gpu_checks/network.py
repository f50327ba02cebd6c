"""YOLOv8 in plain torch, in the official layout of its weights: where there is no ultralytics, and no checkpoint.

The architecture is published (ultralytics' yolov8.yaml: backbone of C2f stages and SPPF, a path aggregation neck, an
anchor-free head with Distribution Focal Loss); the decoding is `visionfast.families.yolov8_modules`. A test holds it
against ultralytics' own blocks with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from visionfast.checkpoint import Checkpoint
from visionfast.errors import UnsupportedModelError
from visionfast.families import LoadedModel
from visionfast.families.yolov8_modules import (
    YoloGraph,
    _features,
    _inputs,
    _kept_outputs,
    level_strides,
    load_weights,
    shapes_agree,
)
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, Task, TensorSpec

__all__ = ["SCALES", "seeded", "with_weights"]

SCALES: dict[str, tuple[float, float, int]] = {  # depth, width, channels at most
    "tiny": (0.33, 0.125, 256),  # not a published one: for rehearsals
    "n": (0.33, 0.25, 1024),
    "s": (0.33, 0.50, 1024),
    "m": (0.67, 0.75, 768),
    "l": (1.00, 1.00, 512),
    "x": (1.00, 1.25, 512),
}
_REG_MAX = 16
_MASKS = 32
_BIAS = -5.0  # of the class logits
_SILU_GAIN = 1.68


class _Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int = 1, s: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2, bias=False)
        self.bn = nn.BatchNorm2d(c2)

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.silu(self.bn(self.conv(x)))


class _Bottleneck(nn.Module):
    def __init__(self, c: int, add: bool) -> None:
        super().__init__()
        self.cv1, self.cv2, self._add = _Conv(c, c, 3), _Conv(c, c, 3), add

    def forward(self, x: torch.Tensor) -> Any:
        y = self.cv2(self.cv1(x))
        return x + y if self._add else y


class _C2f(nn.Module):
    def __init__(self, c1: int, c2: int, n: int, add: bool = False) -> None:
        super().__init__()
        self._half = c2 // 2
        self.cv1, self.cv2 = _Conv(c1, c2), _Conv((2 + n) * self._half, c2)
        self.m = nn.ModuleList(_Bottleneck(self._half, add) for _ in range(n))

    def forward(self, x: torch.Tensor) -> Any:
        parts = list(self.cv1(x).split((self._half, self._half), 1))
        for block in self.m:
            parts.append(block(parts[-1]))
        return self.cv2(torch.cat(parts, 1))


class _Sppf(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.cv1, self.cv2 = _Conv(c, c // 2), _Conv(2 * c, c)

    def forward(self, x: torch.Tensor) -> Any:
        parts = [self.cv1(x)]
        for _ in range(3):
            parts.append(nn.functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.cv2(torch.cat(parts, 1))


class _Upsample(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")


class _Concat(nn.Module):
    def forward(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts), 1)


class _Proto(nn.Module):
    def __init__(self, c: int, inner: int) -> None:
        super().__init__()
        self.cv1, self.upsample = _Conv(c, inner, 3), nn.ConvTranspose2d(inner, inner, 2, 2, 0, bias=True)
        self.cv2, self.cv3 = _Conv(inner, inner, 3), _Conv(inner, _MASKS)

    def forward(self, x: torch.Tensor) -> Any:
        return self.cv3(self.cv2(self.upsample(self.cv1(x))))


class _Dfl(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(_REG_MAX, 1, 1, bias=False)
        self.conv.weight.data[:] = torch.arange(_REG_MAX, dtype=torch.float32).view(1, -1, 1, 1)


class _Head(nn.Module):
    """Only its branches: `YoloGraph` runs them."""

    def __init__(self, channels: Sequence[int], classes: int, prototypes: int) -> None:
        super().__init__()
        box, score = max(16, channels[0] // 4, 4 * _REG_MAX), max(channels[0], min(classes, 100))
        self.cv2 = _branches(channels, box, 4 * _REG_MAX)
        self.cv3 = _branches(channels, score, classes)
        self.dfl = _Dfl()
        if prototypes:
            self.proto = _Proto(channels[0], prototypes)
            self.cv4 = _branches(channels, max(channels[0] // 4, _MASKS), _MASKS)


def _branches(channels: Sequence[int], inner: int, out: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(_Conv(c, inner, 3), _Conv(inner, inner, 3), nn.Conv2d(inner, out, 1)) for c in channels
    )


def _blocks(scale: str, classes: int, task: Task) -> nn.Sequential:
    depth, width, most = SCALES[scale]

    def c(channels: int) -> int:
        return math.ceil(min(channels, most) * width / 8) * 8

    def n(repeats: int) -> int:
        return max(round(repeats * depth), 1)

    up, cat = _Upsample, _Concat
    layers: list[tuple[nn.Module, int | list[int]]] = [
        (_Conv(3, c(64), 3, 2), -1),
        (_Conv(c(64), c(128), 3, 2), -1),
        (_C2f(c(128), c(128), n(3), True), -1),
        (_Conv(c(128), c(256), 3, 2), -1),
        (_C2f(c(256), c(256), n(6), True), -1),
        (_Conv(c(256), c(512), 3, 2), -1),
        (_C2f(c(512), c(512), n(6), True), -1),
        (_Conv(c(512), c(1024), 3, 2), -1),
        (_C2f(c(1024), c(1024), n(3), True), -1),
        (_Sppf(c(1024)), -1),
        (up(), -1),
        (cat(), [-1, 6]),
        (_C2f(c(1024) + c(512), c(512), n(3)), -1),
        (up(), -1),
        (cat(), [-1, 4]),
        (_C2f(c(512) + c(256), c(256), n(3)), -1),
        (_Conv(c(256), c(256), 3, 2), -1),
        (cat(), [-1, 12]),
        (_C2f(c(256) + c(512), c(512), n(3)), -1),
        (_Conv(c(512), c(512), 3, 2), -1),
        (cat(), [-1, 9]),
        (_C2f(c(512) + c(1024), c(1024), n(3)), -1),
        (_Head([c(256), c(512), c(1024)], classes, c(256) if task == "segment" else 0), [15, 18, 21]),
    ]
    blocks: Any = nn.Sequential(*(module for module, _ in layers))
    for block, (_, source) in zip(blocks, layers, strict=True):
        block.f = source
    found: nn.Sequential = blocks.eval()
    return found


def seeded(
    scale: str, task: Task, *, size_hw: tuple[int, int], batch: int, classes: int = 80, seed: int = 0
) -> LoadedModel:
    """An untrained network: its scores differ from place to place, and find nothing at the usual threshold."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        blocks = _blocks(scale, classes, task)
        for module in blocks.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) and module is not blocks[-1].dfl.conv:  # type: ignore[union-attr]
                # torch's own initial weights let the signal fade: all scores would be the bias's, for every picture.
                # This keeps its power through SiLU (He et al., arXiv:1502.01852, with SiLU's gain instead of ReLU's).
                nn.init.normal_(module.weight, std=_SILU_GAIN / math.sqrt(module.weight[0].numel()))
        _set_spread(blocks)
    weights = {name: tensor.detach().clone() for name, tensor in blocks.state_dict().items()}
    return _loaded(_blocks(scale, classes, task), weights, scale, task, size_hw, batch, classes)


def _set_spread(blocks: nn.Sequential) -> None:
    """Scales the head's last convolutions so that what they put out for a picture spreads as a trained network's."""
    inputs = _inputs(blocks)
    y, x = torch.meshgrid(torch.linspace(0, 9, 256), torch.linspace(0, 7, 256), indexing="ij")
    picture = torch.stack((x.sin() * y.cos(), (x + y).sin(), (x * y / 4).cos()))[None] * 0.4 + 0.5  # (1, 3, 256, 256)
    features = _features(blocks, inputs, _kept_outputs(inputs), picture)
    head: Any = blocks[-1]
    for branches, spread, bias in ((head.cv2, 1.0, 0.0), (head.cv3, 0.4, _BIAS)):
        for branch, feature in zip(branches, features, strict=True):
            last = branch[-1]
            nn.init.zeros_(last.bias)
            last.weight.mul_(spread / branch(feature).std())
            nn.init.constant_(last.bias, bias)


def with_weights(checkpoint: Checkpoint, *, size_hw: tuple[int, int], batch: int) -> LoadedModel:
    """A YOLOv8 checkpoint without ultralytics.

    Raises:
        UnsupportedModelError: its weights are not those of a published size.
    """
    weights = {key.partition("model.")[2] or key: tensor for key, tensor in checkpoint.state_dict.items()}
    task: Task = "segment" if any(".proto." in key for key in weights) else "detect"
    last = weights.get("22.cv3.0.2.bias")
    for scale in SCALES if last is not None else ():
        with torch.device("meta"):
            blocks = _blocks(scale, len(last), task)  # type: ignore[arg-type]
        if not shapes_agree(blocks, weights):
            return _loaded(blocks, weights, scale, task, size_hw, batch, blocks[-1].cv3[0][2].out_channels)  # type: ignore[index, union-attr]
    raise UnsupportedModelError(
        f"{checkpoint.path}: not a YOLOv8 of a published size; ultralytics is needed to rebuild it"
    )


def _loaded(
    blocks: nn.Sequential,
    weights: dict[str, torch.Tensor],
    scale: str,
    task: Task,
    size_hw: tuple[int, int],
    batch: int,
    classes: int,
) -> LoadedModel:
    name = f"yolov8{scale}{'-seg' if task == 'segment' else ''}"
    strides = level_strides(_blocks_on_meta(scale, classes, task), name)
    load_weights(blocks, weights)
    h, w = size_hw
    anchors = sum((h // stride) * (w // stride) for stride in strides)
    rows = 4 + classes + (_MASKS if task == "segment" else 0)
    outputs = [TensorSpec("predictions", (batch, rows, anchors), "float32")]
    if task == "segment":
        outputs.append(TensorSpec("prototypes", (batch, _MASKS, h // 4, w // 4), "float32"))
    graph = GraphSpec("model", (TensorSpec("images", (batch, 3, h, w), "float32", "NCHW"),), tuple(outputs))
    names = tuple(f"class_{i}" for i in range(classes))
    spec = ModelSpec(name, "yolov8", name, task, (graph,), PreprocessSpec(size_hw), names, strides)
    return LoadedModel(spec, {"model": YoloGraph(blocks, size_hw, strides).eval()}, {"model": ("decode",)})


def _blocks_on_meta(scale: str, classes: int, task: Task) -> nn.Sequential:
    with torch.device("meta"):
        return _blocks(scale, classes, task)
