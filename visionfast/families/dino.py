"""DINOv2 and DINOv3: told apart by their weights' names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from visionfast.checkpoint import Checkpoint
from visionfast.checkpoint.pickled import printable
from visionfast.errors import OptionError
from visionfast.families import LoadedModel
from visionfast.families.dino_layouts import LAYOUTS, Layout, network_weights, prefix, shape_of, unwrapped
from visionfast.families.dino_published import PUBLISHED, Architecture
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, Resize, TensorSpec
from visionfast.whole_numbers import MAX_BATCH, checked_whole

if TYPE_CHECKING:
    import torch

__all__ = ["Dino"]

_SIZE_HW = (224, 224)  # of the publisher's evaluation transform, for both generations
_COVER = 256 / 224  # of the same: the short side becomes 256 pixels, of which the middle 224 are looked at
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation
# Of DINOv3's ViT-L that was trained on satellite images (SAT-493M). Of Meta's two files of this size it alone has the
# key; in the other layouts nothing tells it from the one for photographs.
_SATELLITE = ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143))
_SATELLITE_SIZE, _SATELLITE_KEY = "dinov3_vitl16", "local_cls_norm.weight"

# What relatives are told by, in the publishers' layouts.
_CLASS_TOKENS = ("cls_token", "embeddings.cls_token")
_BLOCK = re.compile(r"(?:blocks(?:\.\d+)?|encoder\.layer|(?:model\.)?layer)\.(\d+)\.", re.ASCII)
_LAYER_SCALE = re.compile(r"\.(?:ls1\.gamma|gamma_1|layer_scale1\.lambda1)$")
_CONVNEXT_KEYS = (
    ("norms.3.weight", "stages.0.0.gamma"),
    ("layer_norm.weight", "stages.0.layers.0.gamma"),
    ("layer_norm.weight", "model.stages.0.layers.0.gamma"),
)
_WIDTH_OF_7B = 4096
# Of a side, pixels: the largest that DINOv3's paper shows features of. Every patch attends to every other, so that a
# square of twice the side takes up to sixteen times as long.
_MAX_SIDE = 4096
_MAX_NAME = 200
_LICENSES = {2: "Apache-2.0", 3: "DINOv3 License (Meta)"}


class Dino:
    """The family, see `visionfast.families.Family`."""

    name = "dino"
    handles = "DINOv2 (ViT-S, B, L, g, with registers or without) and DINOv3 (ViT-S, S+, B, L, H+)"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return _told(unwrapped(checkpoint.state_dict)) is not None

    def describe(self, checkpoint: Checkpoint) -> str:
        weights = checkpoint.state_dict
        before = prefix(weights)
        inside = {name.removeprefix(before): tensor for name, tensor in weights.items() if name.startswith(before)}
        others = sorted({name.partition(".")[0] for name in weights if not name.startswith(before)})
        if others and (told := _told(inside)):
            beside = ", ".join(printable(name, 20) for name in others[:3])
            return f"{told[1].name} with {beside} beside it (save what is under {printable(before, 40)} by itself)"
        return _relative(inside)

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        size_hw: tuple[int, int] | None = None,
        batch: int = 1,
        resize: Resize | None = None,
    ) -> LoadedModel:
        import torch

        from visionfast.families.dino_modules import VisionTransformer, fp32_islands
        from visionfast.families.weights import load_weights

        if resize not in (None, "centre-crop", "stretch"):
            raise OptionError(f"resize: DINO's images are cropped (centre-crop) or squashed (stretch), got {resize}")
        weights = unwrapped(checkpoint.state_dict)
        told = _told(weights)
        assert told is not None, "load is for what recognises accepts"
        layout, architecture = told
        size_hw = _checked(size_hw or _SIZE_HW, architecture.patch)
        batch = checked_whole("batch", batch, MAX_BATCH)
        satellite = architecture.name == _SATELLITE_SIZE and _SATELLITE_KEY in weights
        with torch.device("meta"):  # it gets all of its weights from the file
            network = VisionTransformer(architecture, size_hw)
        source = str(checkpoint.path)
        load_weights(network, network_weights(layout, network.state_dict(), weights, source), source)
        network.fold()
        spec = ModelSpec(
            name=name,
            family=self.name,
            architecture=architecture.name,
            task="embed",
            graphs=(_graph(architecture, size_hw, batch),),
            preprocess=_preprocess(size_hw, resize or "centre-crop", satellite=satellite),
            class_names=(),
            strides=(),
            license=printable(checkpoint.metadata.get("license") or _LICENSES[architecture.generation], _MAX_NAME),
        )
        return LoadedModel(spec, {"model": network}, {"model": fp32_islands(network)})


def _checked(size_hw: tuple[int, int], patch: int) -> tuple[int, int]:
    if any(not patch <= side <= _MAX_SIDE or side % patch for side in size_hw):
        most = _MAX_SIDE // patch
        near = tuple(min(max(1, round(side / patch)), most) * patch for side in size_hw)
        limit = ""
        if max(size_hw) > _MAX_SIDE:
            limit = f", up to {_MAX_SIDE} a side (attention takes the square of the patches' number)"
        raise OptionError(
            f"imgsz {size_hw[0]}x{size_hw[1]}: expected multiples of the patch of {patch} pixels{limit}; "
            f"{near[0]}x{near[1]} is the nearest"
        )
    return size_hw


def _graph(architecture: Architecture, size_hw: tuple[int, int], batch: int) -> GraphSpec:
    h, w = (side // architecture.patch for side in size_hw)
    return GraphSpec(
        "model",
        (TensorSpec("images", (batch, 3, *size_hw), "float32", "NCHW"),),
        (
            TensorSpec("cls", (batch, architecture.width), "float32"),
            TensorSpec("patches", (batch, h, w, architecture.width), "float32"),
        ),
    )


def _preprocess(size_hw: tuple[int, int], resize: Resize, *, satellite: bool) -> PreprocessSpec:
    """The publisher's evaluation transform (`make_classification_eval_transform`), or the whole image squashed."""
    h, w = size_hw
    mean, std = _SATELLITE if satellite else _IMAGENET
    return PreprocessSpec(
        size_hw,
        resize=resize,
        interpolation="bicubic-antialias",
        pad_value=0,
        mean=mean,
        std=std,
        cover_hw=(round(h * _COVER), round(w * _COVER)) if resize == "centre-crop" else None,
    )


# ---- telling by the parameters' names and shapes ----------------------------------------------------------


def _told(weights: Mapping[str, torch.Tensor]) -> tuple[Layout, Architecture] | None:
    """In which layout unwrapped weights are, and of which size; `None` when they are none of the published."""
    return next(((layout, a) for a in PUBLISHED for layout in LAYOUTS if _fits(weights, layout, a)), None)


def _fits(weights: Mapping[str, torch.Tensor], layout: Layout, architecture: Architecture) -> bool:
    """By what tells the published ones apart; all the rest is checked when the weights are loaded."""
    if layout.generation != architecture.generation or not (layout.class_position or architecture.registers):
        return False
    width, patch = architecture.width, architecture.patch
    (registers,) = layout.names("embed.register_tokens")
    first = layout.names(f"blocks.0.mlp.{'w12' if architecture.gated else 'fc1'}.weight")
    biases = [name for name in layout.names("blocks.0.attn.qkv.bias") if name]
    return (
        layout.shape("embed.cls_token", weights) == (1, 1, width)
        and layout.shape("embed.patch_embed.proj.weight", weights) == (width, 3, patch, patch)
        and (registers in weights) == (architecture.registers > 0)
        and bool(layout.shape("embed.pos_embed", weights)) == (architecture.grid > 0)
        and layout.shape("blocks.0.ls1.gamma", weights) == (width,)
        and layout.shape("blocks.0.attn.qkv.weight", weights) == (3 * width, width)
        and (not biases or any(name in weights for name in biases))
        and all(name in weights for name in first)
        and layout.shape(f"blocks.{architecture.depth - 1}.norm1.weight", weights) == (width,)
        and layout.shape(f"blocks.{architecture.depth}.norm1.weight", weights) == ()
    )


def _relative(weights: Mapping[str, torch.Tensor]) -> str:
    """What weights that are none of the published look like; empty where they are nothing of the kind."""
    if any(set(names) <= set(weights) for names in _CONVNEXT_KEYS):
        return "DINOv3 ConvNeXt"
    width = next((shape[-1] for name in _CLASS_TOKENS if (shape := shape_of(weights, name))), 0)
    blocks = len({match[1] for name in weights if (match := _BLOCK.match(name))})
    if not width or not blocks:
        return ""
    if not any(map(_LAYER_SCALE.search, weights)):
        return "a vision transformer without layer scales (the first DINO, MAE, DeiT, a classifier)"
    if width == _WIDTH_OF_7B:
        return "DINOv3 7B"
    return f"a vision transformer of {blocks} blocks, {width} wide, that is none of DINO's published ones"
