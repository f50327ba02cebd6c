"""DINOv2 and DINOv3: told apart by their weights' names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from visionfast.checkpoint import Checkpoint
from visionfast.checkpoint.pickled import printable
from visionfast.errors import OptionError
from visionfast.families import LoadedModel
from visionfast.families.dino_layouts import canonical
from visionfast.families.dino_published import PUBLISHED, Architecture
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, Resize, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Dino"]

_SIZE_HW = (224, 224)  # of the publisher's evaluation transform, for both generations
_COVER = 256 / 224  # of the same: the short side becomes 256 pixels, of which the middle 224 are looked at
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_NAME = 200
_LICENSES = {2: "Apache-2.0", 3: "DINOv3 License (Meta)"}


class Dino:
    """The family, see `visionfast.families.Family`."""

    name = "dino"
    handles = "DINOv2 (ViT-S, B, L, g, with registers or without) and DINOv3 (ViT-S, S+, B, L, H+)"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return _architecture(canonical(checkpoint.state_dict)) is not None

    def describe(self, checkpoint: Checkpoint) -> str:
        return ""

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        size_hw: tuple[int, int] | None = None,
        batch: int = 1,
        resize: Resize | None = None,
    ) -> LoadedModel:
        from visionfast.families.dino_modules import VisionTransformer, fp32_islands
        from visionfast.families.weights import load_weights

        if resize not in (None, "centre-crop", "stretch"):
            raise OptionError(f"resize: DINO's images are cropped (centre-crop) or squashed (stretch), got {resize}")
        weights = canonical(checkpoint.state_dict)
        architecture = _architecture(weights)
        assert architecture is not None, "load is for what recognises accepts"
        size_hw = _checked(size_hw or _SIZE_HW, architecture.patch)
        network = VisionTransformer(architecture, size_hw)
        load_weights(network, weights, str(checkpoint.path))
        network.fold()
        spec = ModelSpec(
            name=name,
            family=self.name,
            architecture=architecture.name,
            task="embed",
            graphs=(_graph(architecture, size_hw, batch),),
            preprocess=_preprocess(size_hw, resize or "centre-crop"),
            class_names=(),
            strides=(),
            license=printable(checkpoint.metadata.get("license") or _LICENSES[architecture.generation], _MAX_NAME),
        )
        return LoadedModel(spec, {"model": network}, {"model": fp32_islands(network)})


def _checked(size_hw: tuple[int, int], patch: int) -> tuple[int, int]:
    if any(side < patch or side % patch for side in size_hw):
        near = tuple(max(patch, round(side / patch) * patch) for side in size_hw)
        raise OptionError(
            f"imgsz {size_hw[0]}x{size_hw[1]}: expected multiples of the patch of {patch} pixels; "
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


def _preprocess(size_hw: tuple[int, int], resize: Resize) -> PreprocessSpec:
    """The publisher's evaluation transform (`make_classification_eval_transform`), or the whole image squashed."""
    h, w = size_hw
    return PreprocessSpec(
        size_hw,
        resize=resize,
        interpolation="bicubic-antialias",
        pad_value=0,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
        cover_hw=(round(h * _COVER), round(w * _COVER)) if resize == "centre-crop" else None,
    )


# ---- telling by the parameters' names and shapes ----------------------------------------------------------


def _architecture(weights: Mapping[str, torch.Tensor]) -> Architecture | None:
    """What weights of canonical names are of, or `None` when they are none of the published."""
    for architecture in PUBLISHED:
        if _fits(weights, architecture):
            return architecture
    return None


def _fits(weights: Mapping[str, torch.Tensor], architecture: Architecture) -> bool:
    """By what tells the published ones apart; all the rest is checked when the weights are loaded."""
    registers = "embed.storage_tokens" if architecture.generation == 3 else "embed.register_tokens"
    inner, rows = {
        "mlp": ("fc1", architecture.hidden),
        "swiglu": ("w1", architecture.hidden),
        "swiglu-fused": ("w12", 2 * architecture.hidden),
    }[architecture.perceptron]
    last = architecture.depth - 1
    return (
        _shape(weights, "embed.cls_token") == (1, 1, architecture.width)
        and _shape(weights, registers)[1:2] == ((architecture.registers,) if architecture.registers else ())
        and ("embed.pos_embed" in weights) == (architecture.generation == 2)
        and _shape(weights, f"blocks.{last}.mlp.{inner}.weight") == (rows, architecture.width)
        and f"blocks.{last + 1}.norm1.weight" not in weights
    )


def _shape(weights: Mapping[str, torch.Tensor], key: str) -> tuple[int, ...]:
    return tuple(weights[key].shape) if key in weights else ()
