"""The layouts in which DINO's weights are published, brought to one: Meta's, as `dino_modules` names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["canonical"]

_TOP = ("cls_token", "pos_embed", "register_tokens", "storage_tokens", "patch_embed.")


def canonical(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names of `dino_modules.VisionTransformer`; what is not known keeps its own name."""
    return _from_meta(state_dict)


def _from_meta(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {f"embed.{key}" if key.startswith(_TOP) else key: tensor for key, tensor in weights.items()}
    renamed.pop("mask_token", None)  # stands for patches that are hidden in training
    for key in [key for key in renamed if key.endswith(".qkv.bias_mask")]:
        bias = key.removesuffix("_mask")
        # DINOv3's keys have no bias: published as a bias of all three, and a mask to multiply it with.
        renamed[bias] = renamed[bias] * renamed.pop(key).to(renamed[bias].dtype)
    return renamed
