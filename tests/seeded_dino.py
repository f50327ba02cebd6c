"""DINO checkpoints with seeded weights, in the layouts that their publishers use."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["meta_layout", "save_checkpoint", "seeded"]


def save_checkpoint(kind: str, path: Path, seed: int = 0) -> Path:
    """Writes a checkpoint of that kind (`dinov2_vits14`, …) in Meta's layout, as published but for its values."""
    torch.save(meta_layout(kind, seed), path)
    return path


def meta_layout(kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The keys and shapes of the publisher's own file, written down from it, not from the product's module."""
    generation = 2 if kind.startswith("dinov2") else 3
    size = kind.partition("_vit")[2].removesuffix("_reg")
    registers = 4 if generation == 3 or kind.endswith("_reg") else 0
    width, depth = {"s": (384, 12), "b": (768, 12), "l": (1024, 24), "g": (1536, 40), "h": (1280, 32)}[size[0]]
    patch = 14 if generation == 2 else 16
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, width), "mask_token": (1, width)}
    if generation == 2:
        shapes["pos_embed"] = (1, 1 + 37 * 37, width)
    if registers:
        shapes["register_tokens" if generation == 2 else "storage_tokens"] = (1, registers, width)
    if generation == 3:
        shapes["rope_embed.periods"] = (16,)
    shapes |= {"patch_embed.proj.weight": (width, 3, patch, patch), "patch_embed.proj.bias": (width,)}
    for i in range(depth):
        block = f"blocks.{i}"
        shapes |= {f"{block}.{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        shapes |= {f"{block}.{scale}.gamma": (width,) for scale in ("ls1", "ls2")}
        shapes |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        if generation == 3:
            shapes[f"{block}.attn.qkv.bias_mask"] = (3 * width,)
        if size.endswith("plus"):
            hidden = 4 * width
            for layer in ("w1", "w2"):
                shapes |= _linear(f"{block}.mlp.{layer}", hidden, width)
            shapes |= _linear(f"{block}.mlp.w3", width, hidden)
        elif size[0] == "g":
            shapes |= _linear(f"{block}.mlp.w12", 8192, width) | _linear(f"{block}.mlp.w3", width, 4096)
        else:
            shapes |= _linear(f"{block}.mlp.fc1", 4 * width, width) | _linear(f"{block}.mlp.fc2", width, 4 * width)
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return seeded(shapes, seed)


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def seeded(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that leave nothing out: what starts as a constant in training is random, or a mistake would not show."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("periods"):
            weights[name] = 100.0 ** (torch.arange(16) / 16)
        elif name.endswith("bias_mask"):
            mask = torch.ones(shape)
            mask[shape[0] // 3 : 2 * shape[0] // 3] = 0
            weights[name] = mask
        elif ".norm" in name or name.startswith("norm"):
            weights[name] = 1 + 0.1 * noise if name.endswith("weight") else 0.1 * noise
        elif name.endswith(".gamma"):
            weights[name] = 0.3 + 0.1 * noise
        elif name.endswith(".bias"):
            weights[name] = 0.1 * noise
        elif len(shape) > 1 and "token" not in name and "pos_embed" not in name:
            weights[name] = noise * noise[0].numel() ** -0.5
        else:
            weights[name] = 0.5 * noise
    return weights
