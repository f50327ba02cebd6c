"""DINO checkpoints with seeded weights, in the layouts that their publishers use."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

__all__ = ["Layout", "library_model", "meta_layout", "meta_shapes", "save_checkpoint", "seeded", "unseeded_model"]

Layout: TypeAlias = Literal["meta", "hugging-face", "timm", "timm-plain"]
"""Whose; `timm-plain`: DINOv3 without biases of queries and values, which timm has beside `_qkvb`."""

# Width and blocks.
_SIZES = {"s": (384, 12), "b": (768, 12), "l": (1024, 24), "g": (1536, 40), "h": (1280, 32)}


def save_checkpoint(kind: str, path: Path, seed: int = 0, *, layout: Layout = "meta") -> Path:
    """Writes a checkpoint of that kind (`dinov2_vits14`, …) as published but for its values: Meta's .pth, or
    safetensors as the library writes them."""
    if layout == "meta":
        torch.save(meta_layout(kind, seed), path)
    elif layout == "hugging-face":  # whose modules have other names in memory than in a file
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            library_model(kind, layout, seed).save_pretrained(folder)
            (Path(folder) / "model.safetensors").replace(path)
    else:
        from safetensors.torch import save_file

        save_file(library_model(kind, layout, seed).state_dict(), path)
    return path


def library_model(kind: str, layout: Layout, seed: int = 0) -> Any:
    """The model as transformers or timm has it, for images of any size, with seeded weights, in eval mode."""
    model = unseeded_model(kind, layout)
    model.load_state_dict(seeded({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, seed))
    return model.eval()


def unseeded_model(kind: str, layout: Layout) -> Any:
    return _hugging_face(kind) if layout == "hugging-face" else _timm(kind, "" if layout == "timm-plain" else "_qkvb")


def _timm(kind: str, biases: str) -> Any:
    import timm

    name = {"s": "small", "b": "base", "l": "large", "g": "giant", "h": "huge"}[_size(kind)[0]]
    if kind.startswith("dinov2"):
        registers = "_reg4" if kind.endswith("_reg") else ""
        return timm.create_model(f"vit_{name}_patch14{registers}_dinov2", dynamic_img_size=True)
    return timm.create_model(f"vit_{name}{'_plus' if 'plus' in kind else ''}_patch16_dinov3{biases}")


def _hugging_face(kind: str) -> Any:
    from transformers import (
        Dinov2Config,
        Dinov2Model,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
        DINOv3ViTConfig,
        DINOv3ViTModel,
    )

    size = _size(kind)
    width, depth = _SIZES[size[0]]
    options: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": width // 64,
        "image_size": 518 if kind.startswith("dinov2") else 224,
    }
    if kind.startswith("dinov3"):
        plus = "plus" in kind
        options |= {"intermediate_size": 4 * width, "num_register_tokens": 4, "use_gated_mlp": plus}
        return DINOv3ViTModel(DINOv3ViTConfig(**options, hidden_act="silu" if plus else "gelu"))
    options |= {"patch_size": 14, "use_swiglu_ffn": size[0] == "g"}
    if kind.endswith("_reg"):
        return Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**options))
    return Dinov2Model(Dinov2Config(**options))


def _size(kind: str) -> str:
    """`s14`, `s16plus`, …"""
    return kind.partition("_vit")[2].partition("_")[0]


def meta_layout(kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the publisher's own file holds, but for its values."""
    return seeded(meta_shapes(kind), seed)


def meta_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """The keys and shapes of the publisher's own file, written down from it, not from the product's module."""
    generation = 2 if kind.startswith("dinov2") else 3
    size = _size(kind)
    registers = 4 if generation == 3 or kind.endswith("_reg") else 0
    width, depth = _SIZES[size[0]]
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
    return shapes


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def seeded(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that leave nothing out: what starts as a constant in training is random, or a mistake would not show."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("periods"):
            weights[name] = (100.0 ** (torch.arange(16) / 16)).bfloat16()  # as published
        elif name.endswith("bias_mask"):
            mask = torch.ones(shape)
            mask[shape[0] // 3 : 2 * shape[0] // 3] = 0
            weights[name] = mask
        elif ".norm" in name or name.startswith("norm"):
            weights[name] = 1 + 0.1 * noise if name.endswith("weight") else 0.1 * noise
        elif name.endswith((".gamma", ".lambda1", "gamma_1", "gamma_2")):
            weights[name] = 0.3 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.1 * noise
        elif len(shape) > 1 and "token" not in name and "pos" not in name:
            weights[name] = noise * noise[0].numel() ** -0.5
        else:
            weights[name] = 0.5 * noise
    return weights
