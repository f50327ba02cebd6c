"""The layouts in which DINO's weights are published: which tensors of a file make which of the network's.

A layout is a table from the network's names to the file's. A file is held to the names and shapes that its layout has
for the network, so an error names what stands in the file. The sources are the publishers' files and the classes that
read them: Meta's `DinoVisionTransformer`, Hugging Face's `Dinov2Model`, `Dinov2WithRegistersModel` and
`DINOv3ViTModel`, timm's `VisionTransformer` and `Eva`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from visionfast.errors import CheckpointError
from visionfast.families.dino_published import ROPE_PERIODS
from visionfast.families.weights import check_weights

if TYPE_CHECKING:
    import torch

__all__ = ["LAYOUTS", "Layout", "network_weights", "prefix", "shape_of", "unwrapped"]

_Names = tuple[str | None, ...]

_BLOCK = re.compile(r"^blocks\.(\d+)\.", re.ASCII)
_POSITIONS = "embed.pos_embed"
_BIAS = ".attn.qkv.bias"


@dataclass(frozen=True, slots=True)
class Layout:
    """How files of one publisher and one generation name what the network has.

    Attributes:
        publisher: whose they are, for messages.
        generation: 2 or 3.
        renamed: how names of the network begin → how the file's do, `#` for a block's number; the longest counts, and
            what follows stays. Several are parts, joined along the first axis, of which `None` is one that the files
            leave out because it is zero. None at all: the files leave it out, and it is as published.
        unused: names that a file may have and that nothing here needs.
        masked_bias: whether the bias of queries, keys and values stands beside a mask to multiply it with.
        class_position: whether the position embedding begins with the class token's, or the token has it already.
    """

    publisher: str
    generation: Literal[2, 3]
    renamed: Mapping[str, _Names]
    unused: tuple[str, ...] = ("mask_token",)  # stands for patches that are hidden in training
    masked_bias: bool = False
    class_position: bool = True

    def names(self, key: str) -> _Names:
        """In a file, of the parts of what the network calls `key`."""
        block = _BLOCK.match(key)
        general = _BLOCK.sub("blocks.#.", key)
        begin = max((begin for begin in self.renamed if general.startswith(begin)), key=len, default="")
        rest = general.removeprefix(begin)
        named = (None if name is None else name + rest for name in self.renamed.get(begin, ("",)))
        return tuple(name and name.replace("#", block[1] if block else "") for name in named)

    def parts(self, key: str, tensor: torch.Tensor) -> list[tuple[str | None, torch.Tensor]]:
        """The network's `tensor` as the parts that a file has: name and rows of each."""
        names = self.names(key)
        if key == _POSITIONS and not self.class_position:
            tensor = tensor[:, 1:]
        return list(zip(names, tensor.chunk(len(names)), strict=True)) if names else []

    def shape(self, key: str, weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """In a file, of what the network calls `key`; empty where its parts are not all there."""
        shapes = [shape_of(weights, name) for name in self.names(key) if name]
        if () in shapes or len({shape[1:] for shape in shapes}) != 1:
            return ()
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


# ---- from a file to the network ---------------------------------------------------------------------------


def network_weights(
    layout: Layout, expected: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], source: str
) -> dict[str, torch.Tensor]:
    """What a file has for the network, under the network's names; its own tensors where they are whole.

    Args:
        layout: the file's.
        expected: the network's state dict, for names, shapes and types; it may be on the meta device.
        weights: the file's, unwrapped.
        source: the file, for messages.

    Raises:
        CheckpointError: a name is missing, or is one too many, or a tensor's shape is another.
    """
    needed: dict[str, torch.Tensor] = {}
    for key, tensor in expected.items():
        needed |= {name: part for name, part in layout.parts(key, tensor) if name}
        if layout.masked_bias and key.endswith(_BIAS):
            needed[f"{key}_mask"] = tensor
    used = {name: tensor for name, tensor in weights.items() if name not in layout.unused}
    check_weights(needed, used, f"{source}, in {layout.publisher}'s layout")
    return {key: _joined(layout, key, tensor, used, source) for key, tensor in expected.items()}


def _joined(
    layout: Layout, key: str, like: torch.Tensor, weights: Mapping[str, torch.Tensor], source: str
) -> torch.Tensor:
    import torch

    parts = [torch.zeros(part.shape) if name is None else weights[name] for name, part in layout.parts(key, like)]
    if not parts:
        assert key == "rope_embed.periods", key
        return torch.tensor(ROPE_PERIODS)
    tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
    if layout.masked_bias and key.endswith(_BIAS):
        mask = weights[f"{key}_mask"]
        if not mask.isfinite().all():
            # The publisher's class makes it of NaN, for its weights' initialisation to fill in.
            raise CheckpointError(f"{source}: {key}_mask: expected 0 and 1, got NaN; the model was never initialised")
        return tensor * mask.to(tensor.dtype)
    if key == _POSITIONS and not layout.class_position:
        return torch.cat((torch.zeros_like(tensor[:, :1]), tensor), 1)
    return tensor


def unwrapped(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The weights without what stands before every name (`module.`, `backbone.`, `dinov2.`, whatever it is)."""
    before = prefix(weights)
    if not before or not all(name.startswith(before) for name in weights):
        return weights
    return {name.removeprefix(before): tensor for name, tensor in weights.items()}


def prefix(weights: Mapping[str, torch.Tensor]) -> str:
    """What stands before the names of the one model in a file that has a class token; empty where it is not one."""
    found = [name for name in weights if name.rpartition(".")[2] == "cls_token"]
    return found[0].removesuffix("cls_token").removesuffix("embeddings.") if len(found) == 1 else ""


def shape_of(weights: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    """Of a tensor in a file; empty where it is not there, or is none."""
    shape = getattr(weights.get(name), "shape", ())
    return tuple(shape) if isinstance(shape, tuple) else ()


# ---- the layouts ------------------------------------------------------------------------------------------

_META_2: dict[str, _Names] = {"embed.": ("",)}
_META_3: dict[str, _Names] = {
    "embed.": ("",),
    "embed.register_tokens": ("storage_tokens",),
    "blocks.#.mlp.w12.": ("blocks.#.mlp.w1.", "blocks.#.mlp.w2."),
}
_TIMM_2: dict[str, _Names] = {
    "embed.": ("",),
    "embed.register_tokens": ("reg_token",),
    "blocks.#.mlp.w12.": ("blocks.#.mlp.fc1.",),
    "blocks.#.mlp.w3.": ("blocks.#.mlp.fc2.",),
}
_TIMM_3: dict[str, _Names] = {
    "embed.": ("",),
    "embed.register_tokens": ("reg_token",),
    "rope_embed.periods": (),
    "blocks.#.attn.qkv.bias": ("blocks.#.attn.q_bias", None, "blocks.#.attn.v_bias"),
    "blocks.#.ls1.gamma": ("blocks.#.gamma_1",),
    "blocks.#.ls2.gamma": ("blocks.#.gamma_2",),
    "blocks.#.mlp.w12.": ("blocks.#.mlp.fc1_g.", "blocks.#.mlp.fc1_x."),
    "blocks.#.mlp.w3.": ("blocks.#.mlp.fc2.",),
}
# All of these biases are zero in what Meta published, so timm's models leave them out, but for those called `_qkvb`
# (its model cards say so; facebookresearch/dinov3#195 has the sums).
_TIMM_3_PLAIN: dict[str, _Names] = _TIMM_3 | {"blocks.#.attn.qkv.bias": (None,)}


_UNFUSED = ("q_proj", "k_proj", "v_proj", "o_proj")


def _hugging_face(block: str, attention: tuple[str, ...] = _UNFUSED) -> dict[str, _Names]:
    """What both generations share; how the names of a block begin, and of what is in its attention."""
    *query_key_value, projection = (f"{block}attention.{name}." for name in attention)
    return {
        "embed.": ("embeddings.",),
        "blocks.#.": (block,),
        "blocks.#.attn.qkv.": tuple(query_key_value),
        "blocks.#.attn.proj.": (projection,),
        "blocks.#.ls1.gamma": (f"{block}layer_scale1.lambda1",),
        "blocks.#.ls2.gamma": (f"{block}layer_scale2.lambda1",),
        "blocks.#.mlp.w12.": (f"{block}mlp.gate_proj.", f"{block}mlp.up_proj."),
        "blocks.#.mlp.w3.": (f"{block}mlp.down_proj.",),
    }


def _hugging_face_3(block: str) -> dict[str, _Names]:
    return _hugging_face(block) | {
        "embed.patch_embed.proj.": ("embeddings.patch_embeddings.",),
        "rope_embed.periods": (),
        "blocks.#.attn.qkv.bias": (f"{block}attention.q_proj.bias", None, f"{block}attention.v_proj.bias"),
        "blocks.#.mlp.fc1.": (f"{block}mlp.up_proj.",),
        "blocks.#.mlp.fc2.": (f"{block}mlp.down_proj.",),
    }


_HF_2_EMBED: dict[str, _Names] = {
    "embed.pos_embed": ("embeddings.position_embeddings",),
    "embed.patch_embed.proj.": ("embeddings.patch_embeddings.projection.",),
    "norm.": ("layernorm.",),
}
_HF_2_FILE: dict[str, _Names] = (
    _hugging_face("encoder.layer.#.", ("attention.query", "attention.key", "attention.value", "output.dense"))
    | _HF_2_EMBED
    | {
        "blocks.#.mlp.w12.": ("encoder.layer.#.mlp.weights_in.",),
        "blocks.#.mlp.w3.": ("encoder.layer.#.mlp.weights_out.",),
    }
)
_HF_UNUSED = ("embeddings.mask_token",)

LAYOUTS: tuple[Layout, ...] = (
    Layout("Meta", 2, _META_2),
    Layout(
        "Meta",
        3,
        _META_3,
        # The second norm is for the class token of local crops, in training.
        unused=("mask_token", "local_cls_norm.weight", "local_cls_norm.bias"),
        masked_bias=True,
    ),
    Layout("timm", 2, _TIMM_2, class_position=False),  # with registers
    Layout("timm", 2, _TIMM_2),
    Layout("timm", 3, _TIMM_3),
    Layout("timm", 3, _TIMM_3_PLAIN),
    # Its published files, and what its modules are called since transformers 5, which renames as it loads and saves.
    Layout("Hugging Face", 2, _HF_2_FILE, unused=_HF_UNUSED),
    Layout("Hugging Face", 2, _hugging_face("encoder.layer.#.") | _HF_2_EMBED, unused=_HF_UNUSED),
    Layout("Hugging Face", 3, _hugging_face_3("layer.#."), unused=_HF_UNUSED),
    Layout("Hugging Face", 3, _hugging_face_3("model.layer.#."), unused=_HF_UNUSED),
)
