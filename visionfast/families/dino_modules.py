"""DINOv2's and DINOv3's vision transformers, for one fixed input size.

One module for both: they differ in how a patch learns where it is, and in the perceptron of some sizes. Submodules
and parameters are called as in the publisher's own files (`facebookresearch/dinov2`, `facebookresearch/dinov3`), so
that their names are the module's but for what `dino_layouts` says: `embed.` stands before those at the top, registers
are called so in both generations, and both gates of a perceptron are one layer.

The sources are the papers, DINOv2 (Oquab et al., arXiv:2304.07193), Vision Transformers Need Registers (Darcet et al.,
arXiv:2309.16588), DINOv3 (Siméoni et al., arXiv:2508.10104) and, where they are silent, the publisher's code. `B`
images, `T` tokens, `D` channels, `R` registers, an input of h × w patches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from visionfast.families.dino_published import Architecture

__all__ = ["VisionTransformer", "fp32_islands", "interpolated_positions"]

_HEAD = 64  # channels of every published size's attention heads


class VisionTransformer(nn.Module):
    """`images` (B, 3, H, W) normalised → `cls` (B, D) and `patches` (B, h, w, D), both behind the last norm: the
    publisher's `x_norm_clstoken` and `x_norm_patchtokens`.

    Args:
        architecture: which of them.
        size_hw: of the input, pixels; multiples of the patch.
    """

    def __init__(self, architecture: Architecture, size_hw: tuple[int, int]) -> None:
        super().__init__()
        self.architecture = architecture
        self.grid_hw = (size_hw[0] // architecture.patch, size_hw[1] // architecture.patch)
        self.embed = _Embed(architecture, self.grid_hw)
        self.rope_embed = _Rope(self.grid_hw) if architecture.generation == 3 else None
        self.blocks = nn.ModuleList(_Block(architecture) for _ in range(architecture.depth))
        self.norm = nn.LayerNorm(architecture.width, architecture.norm_epsilon)

    def fold(self) -> None:
        """Computes what depends on the weights and the size alone; once, when the weights are in."""
        self.embed.fold()
        if self.rope_embed is not None:
            self.rope_embed.fold()

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.embed(images)  # (B, 1 + R + h·w, D)
        for block in self.blocks:
            tokens = block(tokens, self.rope_embed)
        tokens = self.norm(tokens)
        patches = tokens[:, 1 + self.architecture.registers :]
        return tokens[:, 0], patches.reshape(-1, *self.grid_hw, self.architecture.width)


def fp32_islands(network: VisionTransformer) -> tuple[str, ...]:
    """Paths of what stays FP32 in a half-precision graph: where the residual stream begins, and all that it meets.

    The layers' scales put their results into FP32 before they are added, so the stream between them is FP32 too, in
    which trained DINOv3 reaches what float16 cannot hold (NVIDIA/TensorRT#4723, #4742). The softmax is FP32 in any
    case (`visionfast.functions`).
    """
    kept = (nn.LayerNorm, _Embed, _Rope, _LayerScale)
    return tuple(path for path, module in network.named_modules() if isinstance(module, kept))


# ---- where the tokens come from ---------------------------------------------------------------------------


class _Embed(nn.Module):
    """Patches to tokens, with the class token and the registers before them, and the position embedding added."""

    prefix: torch.Tensor  # (1, 1 + R, D)
    position: torch.Tensor  # (1, h·w, D)

    def __init__(self, architecture: Architecture, grid_hw: tuple[int, int]) -> None:
        super().__init__()
        width, registers = architecture.width, architecture.registers
        self._grid_hw, self._registers, self._trained = grid_hw, registers, architecture.grid
        self._antialias = registers > 0  # published so: with registers, and without
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, architecture.patch, architecture.patch)})
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        if architecture.grid:
            self.pos_embed = nn.Parameter(torch.empty(1, 1 + architecture.grid**2, width))
        if registers:
            self.register_tokens = nn.Parameter(torch.empty(1, registers, width))
        self.register_buffer("prefix", torch.empty(0), persistent=False)
        self.register_buffer("position", torch.empty(0), persistent=False)

    def fold(self) -> None:
        before = [self.cls_token.detach()]
        if self._trained:
            positions = self.pos_embed.detach()  # (1, 1 + M·M, D), the class token's first
            before[0] = before[0] + positions[:, :1]
            self.position = interpolated_positions(positions[:, 1:], self._grid_hw, antialias=self._antialias)
        if self._registers:
            before.append(self.register_tokens.detach())
        self.prefix = torch.cat(before, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        h, w = self._grid_hw
        patches = self.patch_embed["proj"](images).reshape(len(images), -1, h * w).transpose(1, 2)  # (B, h·w, D)
        if self._trained:
            patches = patches + self.position
        return torch.cat((self.prefix.expand(len(images), -1, -1), patches), 1)


def interpolated_positions(positions: torch.Tensor, grid_hw: tuple[int, int], *, antialias: bool) -> torch.Tensor:
    """DINOv2's position embedding for another number of patches: (1, M·M, D) → (1, h·w, D).

    As its publisher has it (`DinoVisionTransformer.interpolate_pos_encoding`): bicubic; for the models with registers
    antialiased, for those without by a scale of (h + 0.1) / M, which they were evaluated with.
    """
    side = math.isqrt(positions.shape[1])
    h, w = grid_hw
    if (h, w) == (side, side):
        return positions
    square = positions.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)  # (1, D, M, M)
    options: dict[str, Any] = {"size": (h, w)}
    if not antialias:
        options = {"scale_factor": ((h + 0.1) / side, (w + 0.1) / side)}
    resized = functional.interpolate(square, mode="bicubic", antialias=antialias, **options)
    assert resized.shape[2:] == (h, w)
    return resized.permute(0, 2, 3, 1).reshape(1, h * w, -1)


class _Rope(nn.Module):
    """DINOv3's rotary position embedding: a patch's queries and keys are turned by angles of where it lies.

    Attributes:
        periods: (E / 4,) of a head of E channels, as in the checkpoint.
    """

    sin: torch.Tensor  # (h·w, E)
    cos: torch.Tensor

    def __init__(self, grid_hw: tuple[int, int]) -> None:
        super().__init__()
        self._grid_hw = grid_hw
        self.register_buffer("periods", torch.empty(_HEAD // 4))
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.register_buffer("cos", torch.empty(0), persistent=False)

    def fold(self) -> None:
        periods = self.get_buffer("periods").float()
        # The middles of the patches, each side from -1 to 1 whatever its length.
        rows, columns = (2 * (torch.arange(side) + 0.5) / side - 1 for side in self._grid_hw)
        where = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).reshape(-1, 2, 1)  # (h·w, 2, 1)
        angles = (2 * math.pi * where / periods).flatten(1).repeat(1, 2)  # (h·w, E)
        self.sin, self.cos = angles.sin(), angles.cos()

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """(B, heads, T, E): turns the last h·w tokens; the class token and the registers lie nowhere."""
        first = heads.shape[2] - self.sin.shape[0]
        before, patches = heads[:, :, :first], heads[:, :, first:]
        one, other = patches[..., : _HEAD // 2], patches[..., _HEAD // 2 :]
        turned = patches * self.cos + torch.cat((-other, one), -1) * self.sin
        return torch.cat((before, turned), 2)


# ---- a block ----------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width = architecture.width
        self.norm1 = nn.LayerNorm(width, architecture.norm_epsilon)
        self.attn = _Attention(width)
        self.ls1 = _LayerScale(width)
        self.norm2 = nn.LayerNorm(width, architecture.norm_epsilon)
        self.mlp = (_SwiGlu if architecture.gated else _Mlp)(width, architecture.hidden)
        self.ls2 = _LayerScale(width)

    def forward(self, tokens: torch.Tensor, rope: _Rope | None) -> torch.Tensor:
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens), rope))
        attended: torch.Tensor = tokens + self.ls2(self.mlp(self.norm2(tokens)))
        return attended


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self._heads = width // _HEAD
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor, rope: _Rope | None) -> torch.Tensor:
        batch, count, width = tokens.shape
        query, key, value = (
            part.reshape(batch, count, self._heads, _HEAD).transpose(1, 2) for part in self.qkv(tokens).split(width, -1)
        )  # (B, heads, T, E)
        if rope is not None:
            # Turned in FP32, multiplied in what they came in.
            query, key = rope(query).to(value.dtype), rope(key).to(value.dtype)
        attended = functional.scaled_dot_product_attention(query, key, value, scale=_HEAD**-0.5)
        found: torch.Tensor = self.proj(attended.transpose(1, 2).reshape(batch, count, width))
        return found


class _LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens * self.gamma


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.fc2(functional.gelu(self.fc1(tokens)))
        return mixed


class _SwiGlu(nn.Module):
    """A gated perceptron (Shazeer, arXiv:2002.05202): of two projections, one, through SiLU, scales the other."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self._hidden = hidden
        self.w12 = nn.Linear(width, 2 * hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, other = self.w12(tokens).split(self._hidden, -1)
        mixed: torch.Tensor = self.w3(functional.silu(gate) * other)
        return mixed
