"""The sizes that DINOv2 and DINOv3 were published in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["PUBLISHED", "Architecture"]

_Perceptron: TypeAlias = Literal["mlp", "swiglu-fused", "swiglu"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One published size.

    Attributes:
        name: as its publisher calls it, e.g. `dinov2_vits14_reg`.
        generation: 2 or 3.
        width: channels of a token.
        depth: blocks.
        perceptron: `mlp`; `swiglu-fused`, both gates in one layer (DINOv2 g); `swiglu` (DINOv3 S+, H+).
        hidden: channels inside the perceptron.
        registers: tokens beside the class token that stand for no patch.
        patch: side of a patch, pixels.
        grid: side of the square that the position embedding was trained for, patches; 0 where it has none.
    """

    name: str
    generation: Literal[2, 3]
    width: int
    depth: int
    perceptron: _Perceptron
    hidden: int
    registers: int
    patch: int
    grid: int = 0

    @property
    def norm_epsilon(self) -> float:
        return 1e-6 if self.generation == 2 else 1e-5


_DINOV2: tuple[tuple[str, int, int, _Perceptron, int], ...] = (
    ("vits14", 384, 12, "mlp", 1536),
    ("vitb14", 768, 12, "mlp", 3072),
    ("vitl14", 1024, 24, "mlp", 4096),
    ("vitg14", 1536, 40, "swiglu-fused", 4096),
)
_DINOV3: tuple[tuple[str, int, int, _Perceptron, int], ...] = (
    ("vits16", 384, 12, "mlp", 1536),
    ("vits16plus", 384, 12, "swiglu", 1536),
    ("vitb16", 768, 12, "mlp", 3072),
    ("vitl16", 1024, 24, "mlp", 4096),
    ("vith16plus", 1280, 32, "swiglu", 5120),
)

PUBLISHED: tuple[Architecture, ...] = (
    *(
        Architecture(f"dinov2_{name}{suffix}", 2, w, d, p, i, registers=registers, patch=14, grid=37)
        for name, w, d, p, i in _DINOV2
        for suffix, registers in (("", 0), ("_reg", 4))
    ),
    *(Architecture(f"dinov3_{name}", 3, w, d, p, i, registers=4, patch=16) for name, w, d, p, i in _DINOV3),
)
"""Of DINOv3 the sizes that were distilled from its 7B model."""
