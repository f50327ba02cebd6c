"""The sizes that DINOv2 and DINOv3 were published in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PUBLISHED", "ROPE_PERIODS", "Architecture"]

ROPE_PERIODS: tuple[float, ...] = tuple(100.0 ** (i / 16) for i in range(16))
"""Of DINOv3's rotary position embedding, for 16 of a head's 64 channels, where a file leaves them out. Meta's own files
have them, rounded to bfloat16."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One published size.

    Attributes:
        name: as its publisher calls it, e.g. `dinov2_vits14_reg`.
        generation: 2 or 3.
        width: channels of a token.
        depth: blocks.
        hidden: channels inside the perceptron.
        gated: whether that is a SwiGLU.
        registers: tokens beside the class token that stand for no patch.
        patch: side of a patch, pixels.
        grid: side of the square that the position embedding was trained for, patches; 0 where it has none.
    """

    name: str
    generation: Literal[2, 3]
    width: int
    depth: int
    hidden: int
    gated: bool
    registers: int
    patch: int
    grid: int = 0

    @property
    def norm_epsilon(self) -> float:
        return 1e-6 if self.generation == 2 else 1e-5


_DINOV2: tuple[tuple[str, int, int, int, bool], ...] = (
    ("vits14", 384, 12, 1536, False),
    ("vitb14", 768, 12, 3072, False),
    ("vitl14", 1024, 24, 4096, False),
    ("vitg14", 1536, 40, 4096, True),
)
_DINOV3: tuple[tuple[str, int, int, int, bool], ...] = (
    ("vits16plus", 384, 12, 1536, True),
    ("vits16", 384, 12, 1536, False),
    ("vitb16", 768, 12, 3072, False),
    ("vitl16", 1024, 24, 4096, False),
    ("vith16plus", 1280, 32, 5120, True),
)

PUBLISHED: tuple[Architecture, ...] = (
    *(
        Architecture(f"dinov2_{name}{suffix}", 2, width, depth, hidden, gated, registers, patch=14, grid=37)
        for name, width, depth, hidden, gated in _DINOV2
        for suffix, registers in (("_reg", 4), ("", 0))
    ),
    *(
        Architecture(f"dinov3_{name}", 3, width, depth, hidden, gated, registers=4, patch=16)
        for name, width, depth, hidden, gated in _DINOV3
    ),
)
"""What has parts that another lacks stands before it, which the first that fits is told by; of DINOv3 the sizes that
were distilled from its 7B model."""
