"""A prompt segmenter in miniature: an encoder, and a decoder whose numbers of prompts and points vary.

It has what the large ones have that compilers stumble over: two sorts of attention, positions as a matrix product, a
choice by label, masks that are brought in by a convolution, and the two graphs' tensors handed on by name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from visionfast.families import LoadedModel
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, PromptSpec, TensorSpec

__all__ = ["DECODER", "ENCODER", "SmallDecoder", "SmallEncoder", "prompt_feeds", "small_prompt_segmenter"]

ENCODER = GraphSpec(
    "encoder",
    (TensorSpec("images", (1, 3, 32, 32), "float32", "NCHW"),),
    (TensorSpec("image_embeddings", (1, 16, 8, 8), "float32"), TensorSpec("high_res", (1, 4, 16, 16), "float32")),
)
DECODER = GraphSpec(
    "decoder",
    (
        *ENCODER.outputs,
        TensorSpec("points", (5, 6, 2), "float32", axes=("prompts", "points", "")),
        TensorSpec("labels", (5, 6), "float32", axes=("prompts", "points")),
        TensorSpec("has_mask", (5,), "float32", axes=("prompts",)),
    ),
    (
        TensorSpec("masks", (5, 4, 16, 16), "float32", axes=("prompts", "", "", "")),
        TensorSpec("scores", (5, 4), "float32", axes=("prompts", "")),
    ),
    {"prompts": 1, "points": 2},
)


class SmallEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.finer = nn.Conv2d(3, 4, 2, 2)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (1, 64, 16)
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + (query @ key.transpose(-2, -1) * 0.25).softmax(dim=-1) @ value
        return self.norm(x).transpose(1, 2).reshape(1, 16, 8, 8), self.finer(images)


class SmallDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Linear(2, 16)
        self.kinds = nn.Embedding(2, 16)
        self.own = nn.Embedding(5, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.up = nn.ConvTranspose2d(16, 4, 2, 2)
        self.weights = nn.Linear(16, 4)

    def forward(
        self,
        image_embeddings: torch.Tensor,
        high_res: torch.Tensor,
        points: torch.Tensor,
        labels: torch.Tensor,
        has_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kinds = torch.where((labels > 0)[..., None], self.kinds.weight[1], self.kinds.weight[0])
        prompts = self.position(points / 32).sin() + kinds  # (P, N, 16)
        own = self.own.weight[None].expand(points.shape[0], -1, -1)
        tokens = torch.cat([own.to(prompts.dtype), prompts], 1)  # (P, 5 + N, 16)
        image = image_embeddings + has_mask[:, None, None, None].to(image_embeddings.dtype)  # (P, 16, 8, 8)
        flat = image.flatten(2).transpose(1, 2)
        q, k, v = (layer(x)[:, None] for layer, x in ((self.query, tokens), (self.key, flat), (self.value, flat)))
        tokens = self.norm(tokens + functional.scaled_dot_product_attention(q, k, v)[:, 0])
        pixels = self.up(image) + high_res  # (P, 4, 16, 16)
        masks = (self.weights(tokens[:, 1:5]) @ pixels.flatten(2)).reshape(-1, 4, 16, 16)
        return masks, tokens[:, 1:5].mean(-1)


def small_prompt_segmenter(**changed: Any) -> LoadedModel:
    """Seeded; `changed` are fields of the `LoadedModel`."""
    torch.manual_seed(0)
    spec = ModelSpec(
        name="small",
        family="sam",
        architecture="small",
        task="prompt-segment",
        graphs=(ENCODER, DECODER),
        preprocess=PreprocessSpec((32, 32), resize="longest-side", pad_value=None, mean=(0.5, 0.5, 0.5)),
        class_names=(),
        strides=(),
        prompts=PromptSpec(box_first=False, pad_with_box=False),
    )
    fields: dict[str, Any] = {
        "spec": spec,
        "modules": {"encoder": SmallEncoder().eval(), "decoder": SmallDecoder().eval()},
        "fp32_islands": {"encoder": ("norm",), "decoder": ("position", "norm")},
        "fp32_inputs": {"decoder": ("points", "labels", "has_mask")},
    }
    return LoadedModel(**fields | changed)


def prompt_feeds(prompts: int, points: int, *, seed: int = 0, graph: GraphSpec = DECODER) -> dict[str, np.ndarray]:
    """Random inputs of the decoder, in the dtypes of `graph`."""
    rng = np.random.default_rng(seed)
    sizes = {"prompts": prompts, "points": points}
    feeds = {spec.name: rng.standard_normal(spec.sized(sizes)).astype(spec.dtype) for spec in graph.inputs}
    feeds["points"] = (rng.random((prompts, points, 2)) * 32).astype(feeds["points"].dtype)
    return feeds
