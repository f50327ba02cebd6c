"""Segment Anything: SAM, MobileSAM and SAM 2's image part, told apart by their weights' names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from visionfast.checkpoint import Checkpoint
from visionfast.checkpoint.pickled import printable
from visionfast.errors import OptionError
from visionfast.families import LoadedModel
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, PromptSpec, Resize, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Sam"]

_SIZE_HW = (1024, 1024)  # every published checkpoint's own
_MAX_PROMPTS = 64  # a call of the published automatic generators
_MAX_POINTS = 32
_PROMPT_INPUTS = ("points", "labels", "mask_input", "has_mask")
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_NAME = 200

# The width of the image encoder and how many blocks it has.
_VIT = {(768, 12): "sam_vit_b", (1024, 24): "sam_vit_l", (1280, 32): "sam_vit_h"}
_HIERA = {(96, 12): "tiny", (96, 16): "small", (112, 24): "base_plus", (144, 48): "large"}
_TINY_VIT_KEY = "image_encoder.patch_embed.seq.0.c.weight"
_TINY_VIT_STAGES = (
    "image_encoder.layers.0.blocks.0.conv3.c.weight",
    *(f"image_encoder.layers.{i}.blocks.0.attn.norm.weight" for i in (1, 2, 3)),
)
_TINY_VIT_WIDTHS = (64, 128, 160, 320)

# What a training wrapper puts before every key. SAM 3 has keys of its own under `tracker.` and `detector.`.
_WRAPPERS = ("module.", "model.", "sam.")


class Sam:
    """The family, see `visionfast.families.Family`."""

    name = "sam"
    handles = "SAM (ViT-B, ViT-L, ViT-H), MobileSAM, SAM 2 and SAM 2.1 (Hiera tiny, small, base plus, large)"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        weights = _unwrapped(checkpoint.state_dict)
        return bool(_architecture(weights)) and not _derivative(weights)

    def describe(self, checkpoint: Checkpoint) -> str:
        weights = _unwrapped(checkpoint.state_dict)
        parts = _parts(weights)
        if {"detector_model", "tracker_model"} & parts or any("vision_backbone." in key for key in weights):
            return "SAM 3"
        if not any({f"{prefix}prompt_encoder", f"{prefix}mask_decoder"} <= parts for prefix in ("", "sam_")):
            return ""
        if derived := _derivative(weights):
            return derived
        if "shared_image_embedding" in parts:
            return "a Segment Anything model in Hugging Face's layout (use its publisher's own file)"
        return "" if _architecture(weights) else f"a Segment Anything model with {_image_encoder(weights)}"

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        size_hw: tuple[int, int] | None = None,
        batch: int = 1,
        resize: Resize | None = None,
    ) -> LoadedModel:
        from visionfast.families.sam_modules import build_network, graphs_of, layer_norms
        from visionfast.families.weights import load_weights

        if size_hw not in (None, _SIZE_HW):
            raise OptionError(
                f"imgsz: a Segment Anything model takes {_SIZE_HW[0]}x{_SIZE_HW[1]} only, which its position encodings "
                f"are made for, got {size_hw[0]}x{size_hw[1]}; images of any size are brought to it"
            )
        if batch != 1:
            raise OptionError(f"batch: a Segment Anything encoder takes 1 image a call, got {batch}; leave it out")
        if resize is not None:
            raise OptionError(f"resize {resize}: a Segment Anything model has one of its own; leave it out")
        weights = _unwrapped(checkpoint.state_dict)
        architecture = _architecture(weights)
        assert architecture, "load is for what recognises accepts"
        network = build_network(architecture)
        load_weights(network, weights, str(checkpoint.path))
        encoder, decoder = graphs_of(network)
        second = architecture.startswith("sam2")
        spec = ModelSpec(
            name=name,
            family=self.name,
            architecture=architecture,
            task="prompt-segment",
            graphs=_graphs(second),
            preprocess=PreprocessSpec(
                _SIZE_HW,
                resize="stretch" if second else "longest-side",
                interpolation="bilinear-antialias",
                pad_value=None,
                mean=_IMAGENET_MEAN,
                std=_IMAGENET_STD,
            ),
            class_names=(),
            strides=(),
            license=printable(checkpoint.metadata.get("license") or "", _MAX_NAME),
            prompts=_prompts(second),
        )
        return LoadedModel(
            spec,
            {"encoder": encoder, "decoder": decoder},
            {"encoder": layer_norms(encoder), "decoder": ("embed", *_outside(layer_norms(decoder), "embed."))},
            {"decoder": _PROMPT_INPUTS},
        )


# ---- telling by the parameters' names and shapes ----------------------------------------------------------


def _unwrapped(state_dict: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The weights without a training wrapper's prefix, where every key has it."""
    for prefix in _WRAPPERS * 2:  # a wrapper in a wrapper, in either order
        if state_dict and all(key.startswith(prefix) for key in state_dict):
            state_dict = {key.removeprefix(prefix): tensor for key, tensor in state_dict.items()}
    return state_dict


def _architecture(weights: Mapping[str, torch.Tensor]) -> str:
    """The publishers' name for it, or empty when it is none of theirs."""
    parts = _parts(weights)
    if {"image_encoder", "prompt_encoder", "mask_decoder"} <= parts:
        if _TINY_VIT_KEY in weights:
            widths = tuple(_size(weights, key) for key in _TINY_VIT_STAGES)
            return "mobile_sam" if widths == _TINY_VIT_WIDTHS else ""
        width = _size(weights, "image_encoder.patch_embed.proj.weight")
        return _VIT.get((width, _count(weights, "image_encoder.blocks")), "")
    if {"image_encoder", "sam_prompt_encoder", "sam_mask_decoder"} <= parts:
        width = _size(weights, "image_encoder.trunk.patch_embed.proj.weight")
        size = _HIERA.get((width, _count(weights, "image_encoder.trunk.blocks")), "")
        generation = "sam2.1" if "no_obj_embed_spatial" in weights else "sam2"
        return f"{generation}_hiera_{size}" if size else ""
    return ""


def _derivative(weights: Iterable[str]) -> str:
    """Whose layers stand among SAM's own: what was made from it, or empty."""
    keys = tuple(weights)
    if any(re.search(r"\.hf_token\.|\.hf_mlp\.", key) for key in keys):
        return "SAM-HQ"
    if any(re.search(r"(?i)lora|\.linear_[ab]_[qkv]\.", key) for key in keys):
        return "a SAM fine-tune with LoRA layers (merge them into its weights first)"
    return ""


def _image_encoder(weights: Mapping[str, torch.Tensor]) -> str:
    """What a Segment Anything model's unknown image encoder looks like."""
    if _TINY_VIT_KEY in weights:
        return "a TinyViT image encoder, but not of MobileSAM's size"
    for encoder in ("image_encoder.trunk", "image_encoder"):
        if blocks := _count(weights, f"{encoder}.blocks"):
            width = _size(weights, f"{encoder}.patch_embed.proj.weight")
            return f"an image encoder of {blocks} blocks, {width} wide (EfficientSAM, or a size that was not published)"
    if any(key.startswith("image_encoder.backbone.") for key in weights):
        return "EfficientViT's image encoder (EfficientViT-SAM)"
    if any(re.match(r"image_encoder\.(features|stages?)\.", key) for key in weights):
        return "a convolutional image encoder (EdgeSAM, RepViT-SAM)"
    return "another image encoder" if "image_encoder" in _parts(weights) else "no image encoder"


def _parts(weights: Iterable[str]) -> set[str]:
    return {key.partition(".")[0] for key in weights}


def _count(weights: Iterable[str], prefix: str) -> int:
    """How many numbered children a module has."""
    numbered = re.compile(rf"{re.escape(prefix)}\.(\d+)\.", re.ASCII)
    return len({match[1] for key in weights if (match := numbered.match(key))})


def _size(weights: Mapping[str, torch.Tensor], key: str) -> int:
    """The first size of a tensor, 0 where it is not there."""
    shape = weights[key].shape if key in weights else ()
    return int(shape[0]) if shape else 0


# ---- the spec ---------------------------------------------------------------------------------------------


def _graphs(second: bool) -> tuple[GraphSpec, GraphSpec]:
    features = [TensorSpec("image_embeddings", (1, 256, 64, 64), "float32")]
    if second:
        features.append(TensorSpec("high_res_features_0", (1, 32, 256, 256), "float32"))
        features.append(TensorSpec("high_res_features_1", (1, 64, 128, 128), "float32"))
    encoder = GraphSpec("encoder", (TensorSpec("images", (1, 3, *_SIZE_HW), "float32", "NCHW"),), tuple(features))
    decoder = GraphSpec(
        "decoder",
        (
            *features,
            _per_prompt("points", (_MAX_POINTS, 2), ("points", "")),
            _per_prompt("labels", (_MAX_POINTS,), ("points",)),
            _per_prompt("mask_input", (1, 256, 256)),
            _per_prompt("has_mask", ()),
        ),
        (_per_prompt("masks", (4, 256, 256)), _per_prompt("scores", (4,))),
        {"prompts": 1, "points": 2},
    )
    return encoder, decoder


def _per_prompt(name: str, shape: tuple[int, ...], axes: tuple[str, ...] | None = None) -> TensorSpec:
    axes = ("",) * len(shape) if axes is None else axes
    return TensorSpec(name, (_MAX_PROMPTS, *shape), "float32", axes=("prompts", *axes))


def _prompts(second: bool) -> PromptSpec:
    """The publishers' predictors and the thresholds of their automatic generators (`SamAutomaticMaskGenerator`,
    `SAM2AutomaticMaskGenerator`; MobileSAM's is SAM's)."""
    if second:
        return PromptSpec(
            box_first=True, pad_with_box=True, stability=(0.05, 0.98), logit_limit=32.0, score_threshold=0.8
        )
    return PromptSpec(box_first=False, pad_with_box=False)


def _outside(paths: Iterable[str], prefix: str) -> tuple[str, ...]:
    return tuple(path for path in paths if not path.startswith(prefix))
