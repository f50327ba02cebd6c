"""An untrained prompt segmenter in plain torch: a small image encoder, and a decoder of the Segment Anything kind.

The decoder does what SAM's does (Kirillov et al. 2023): mask tokens and points attend to the image and the image to
them, twice; the image is enlarged four times, and each mask token becomes a mask. So it has SAM's tensors and costs
about what SAM's costs, on a machine with neither SAM's code nor its weights. The encoder is a stand-in: three layers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, PromptSpec, TensorSpec

__all__ = ["seeded_prompts"]

_MASKS = 4
_MOST_PROMPTS, _MOST_POINTS = 64, 32


class _Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.mixed = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, images: torch.Tensor) -> Any:
        x = nn.functional.gelu(self.patches(images))
        return nn.functional.group_norm(x + self.mixed(x), 1)  # (1, D, h / 16, w / 16)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> Any:
        """x (P, A, D) asks other (P, B, D)."""
        answer = nn.functional.scaled_dot_product_attention(
            self.q(x)[:, None], self.k(other)[:, None], self.v(other)[:, None]
        )
        return self.norm(x + self.out(answer[:, 0]))


class _Decoder(nn.Module):
    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self._side = side
        self.register_buffer("frequencies", torch.randn(2, width // 2))
        self.kinds = nn.Parameter(torch.randn(5, width))  # of labels -1 to 3
        self.tokens = nn.Parameter(torch.randn(_MASKS + 1, width))
        self.no_mask = nn.Parameter(torch.randn(width))
        self.mask_in = nn.Conv2d(1, width, 4, 4)
        self.to_image = nn.ModuleList(_Attention(width) for _ in range(2))
        self.to_tokens = nn.ModuleList(_Attention(width) for _ in range(2))
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(width, width // 4, 2, 2), nn.ConvTranspose2d(width // 4, width // 8, 2, 2)]
        )
        self.hyper = nn.Linear(width, width // 8)
        self.scores = nn.Linear(width, _MASKS)

    def forward(
        self,
        image_embeddings: torch.Tensor,
        points: torch.Tensor,
        labels: torch.Tensor,
        mask_input: torch.Tensor,
        has_mask: torch.Tensor,
    ) -> Any:
        dtype = image_embeddings.dtype
        angle = (2 * points / self._side - 1) @ self.frequencies.float()  # (P, N, D / 2)
        kinds = (labels[..., None] == torch.arange(-1, 4, device=labels.device)).to(dtype) @ self.kinds
        prompts = torch.cat([angle.sin(), angle.cos()], -1).to(dtype) + kinds
        tokens = torch.cat([self.tokens.expand(len(points), -1, -1), prompts], 1)  # (P, 5 + N, D)
        given = has_mask[:, None, None, None].to(dtype)
        dense = given * self.mask_in(mask_input.to(dtype)) + (1 - given) * self.no_mask[:, None, None]
        image = image_embeddings + dense  # (P, D, g, g)
        grid = image.shape[2:]
        image = image.flatten(2).transpose(1, 2)
        for to_image, to_tokens in zip(self.to_image, self.to_tokens, strict=True):
            tokens = to_image(tokens, image)
            image = to_tokens(image, tokens)
        fine = image.transpose(1, 2).reshape(len(points), -1, *grid)
        for up in self.up:
            fine = nn.functional.gelu(up(fine))  # (P, D / 8, 4 g, 4 g)
        weights = self.hyper(tokens[:, 1 : _MASKS + 1])
        return torch.einsum("pmd,pdhw->pmhw", weights, fine), self.scores(tokens[:, 0])


def seeded_prompts(side: int, width: int, precision: str) -> tuple[ModelSpec, dict[str, nn.Module]]:
    """A model for inputs of `side` × `side` pixels, and the modules of its two graphs: with one side and width the same
    weights in either precision, `float32` or `float16`."""
    grid, plane = side // 16, side // 4
    image = TensorSpec("images", (1, 3, side, side), precision, "NCHW")
    features = TensorSpec("image_embeddings", (1, width, grid, grid), precision)
    p, n = _MOST_PROMPTS, _MOST_POINTS
    inputs = (
        features,
        TensorSpec("points", (p, n, 2), "float32", "", ("prompts", "points", "")),
        TensorSpec("labels", (p, n), "float32", "", ("prompts", "points")),
        TensorSpec("mask_input", (p, 1, plane, plane), "float32", "", ("prompts", "", "", "")),
        TensorSpec("has_mask", (p,), "float32", "", ("prompts",)),
    )
    outputs = (
        TensorSpec("masks", (p, _MASKS, plane, plane), precision, "", ("prompts", "", "", "")),
        TensorSpec("scores", (p, _MASKS), precision, "", ("prompts", "")),
    )
    spec = ModelSpec(
        f"seeded-prompts-{side}",
        "sam",
        "seeded prompt segmenter",
        "prompt-segment",
        (
            GraphSpec("encoder", (image,), (features,)),
            GraphSpec("decoder", inputs, outputs, {"prompts": 1, "points": 2}),
        ),
        PreprocessSpec(
            (side, side), "longest-side", "bilinear-antialias", None, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        ),
        (),
        (),
        prompts=PromptSpec(box_first=False, pad_with_box=False),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        modules = {"encoder": _Encoder(width), "decoder": _Decoder(width, side)}
    dtype = getattr(torch, precision)
    return spec, {name: copy.deepcopy(module).to(dtype).eval() for name, module in modules.items()}
