"""Segment Anything checkpoints with seeded weights, in the layouts that their publishers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["KINDS", "official_layout", "save_checkpoint", "seed_weights"]

KINDS = ("mobile_sam", "sam_vit_b", "sam2.1_hiera_tiny")


def save_checkpoint(kind: str, path: Path, seed: int = 0) -> Path:
    """Writes a checkpoint of that kind, as published but for its values: a bare state dict, or for SAM 2.1
    `{"model": state dict}`."""
    network = official_layout(kind)
    seed_weights(network, seed)
    state_dict = network.state_dict()
    torch.save({"model": state_dict} if kind.startswith("sam2") else state_dict, path)
    return path


def official_layout(kind: str) -> nn.Module:
    """A network with the published keys and shapes. Made without visionfast's own loader."""
    from segment_anything import sam_model_registry
    from ultralytics.models.sam import build

    if kind.startswith("sam_"):
        return sam_model_registry[kind.removeprefix("sam_")]()
    if kind == "mobile_sam":
        return build.build_mobile_sam()
    generation, _, size = kind.partition("_hiera_")
    network: Any = getattr(build, f"build_sam2_{size[0]}")()
    if generation == "sam2.1":
        network.no_obj_embed_spatial = nn.Parameter(torch.zeros(1, 64))
        network.obj_ptr_tpos_proj = nn.Linear(256, 64)
    return network


def seed_weights(network: nn.Module, seed: int) -> None:
    """Weights that leave nothing out and give masks worth comparing.

    What starts as a constant in training (position embeddings, biases, norms) becomes random, or a mistake with it
    would not show. What is enlarged stays smooth, and the last layers are scaled, so that masks are of all sizes with
    connected parts, logits and stabilities spread as trained ones do, and predicted IoUs lie around 0.8.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    transposed = {f"{p}.weight" for p, m in network.named_modules() if isinstance(m, nn.ConvTranspose2d)}
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if not tensor.is_floating_point():
                continue
            if name in transposed:  # (in, out, 2, 2), a pixel's four children alike
                spread = noise(*tensor.shape[:2], 1, 1) + 0.2 * noise(*tensor.shape)
                tensor.copy_(spread * len(tensor) ** -0.5)
            elif bool((tensor == 1).all()):  # a norm's scale or variance
                tensor.copy_((1 + 0.1 * noise(*tensor.shape)).abs())
            elif _is_token(name):
                tensor.copy_(noise(*tensor.shape))
            elif tensor.ndim > 1 and bool(tensor.any()):  # every layer keeps the scale of what goes in
                tensor.copy_(noise(*tensor.shape) * tensor[0].numel() ** -0.5)
            else:
                tensor.copy_(0.1 * noise(*tensor.shape))
            if "output_hypernetworks_mlps" in name and ".layers.2." in name:
                tensor.mul_(3 if name.startswith("sam_") else 8)
            if name.endswith("iou_prediction_head.layers.2.weight"):
                tensor.mul_(1.0 if name.startswith("sam_") else 0.2)
            if name.endswith("iou_prediction_head.layers.2.bias"):
                tensor.add_(1.4 if name.startswith("sam_") else 0.8)  # `sam_`: SAM 2's, which a sigmoid follows


def _is_token(name: str) -> bool:
    tokens = ("iou_token.weight", "mask_tokens.weight", "obj_score_token.weight", "_embed.weight", "_gaussian_matrix")
    return name.endswith(tokens) or ".point_embeddings." in name
