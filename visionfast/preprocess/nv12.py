"""NV12 → RGB in NumPy: the definition that the kernel for decoded video is tested against.

NV12 is what video decoders give: a plane of luma (H, W), and one of chroma (H/2, W/2, 2) with U and V side by
side, each pair for a block of 2 × 2 pixels. Both sides are even.

Chroma is not interpolated: the four pixels of a block share its pair, wherever the stream's siting puts the sample.
The arithmetic is OpenCV's fixed point (`COLOR_YUV2RGB_NV12`, `modules/imgproc/src/color_yuv.simd.hpp`): weights of
20 fractional bits, rounded half up, clipped to 0..255, luma below black clipped first. With BT.601 in limited range,
the only one that OpenCV has, it is equal to OpenCV to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.errors import OptionError, ShapeError

__all__ = ["FRACTION_BITS", "Nv12Frame", "YuvMatrix", "YuvToRgb", "check_nv12", "nv12_to_rgb", "yuv_to_rgb"]

YuvMatrix: TypeAlias = Literal["bt601", "bt709"]

FRACTION_BITS = 20


@dataclass(frozen=True, slots=True, eq=False)
class Nv12Frame:
    """One frame of decoded video, on the host or on a GPU, for `Detector` to look at.

    Attributes:
        y: luma (H, W) uint8, both sides even: an array, or for an engine on a GPU a tensor on that GPU.
        uv: chroma (H/2, W/2, 2) uint8, of the same kind.
        matrix, full_range: as in `yuv_to_rgb`.
    """

    y: Any
    uv: Any
    matrix: YuvMatrix = "bt601"
    full_range: bool = False


class YuvToRgb(NamedTuple):
    """`red = y · luma + v · v_to_red`, and so on, with `y = max(Y - black, 0)`, `u = U - 128`, `v = V - 128`.

    The weights have 20 fractional bits; every sum of theirs fits into 32.
    """

    black: int
    luma: int
    v_to_red: int
    v_to_green: int
    u_to_green: int
    u_to_blue: int


def yuv_to_rgb(matrix: YuvMatrix, full_range: bool = False) -> YuvToRgb:
    """The weights of one colour matrix.

    Args:
        matrix: `bt601` (standard definition, JPEG) or `bt709` (high definition).
        full_range: luma and chroma span 0..255; else 16..235 and 16..240 (limited range, usual in video).

    Raises:
        OptionError: another matrix.
    """
    if matrix not in tuple(_LUMA_SHARES):  # also what cannot be hashed
        raise OptionError(f"matrix: expected one of {', '.join(_LUMA_SHARES)}, got {matrix!r}")
    if matrix == "bt601" and not full_range:
        return YuvToRgb(
            16, *map(_fixed, (1.164, 1.596, -0.813, -0.391, 2.018))
        )  # to three decimals, as OpenCV has them
    red, blue = _LUMA_SHARES[matrix]
    green = 1 - red - blue
    # Y spans 219 levels and Cb, Cr 224 in limited range; Cb = (B - Y) / (2 (1 - blue)), Cr = (R - Y) / (2 (1 - red)).
    black, luma, chroma = (0, 1.0, 1.0) if full_range else (16, 255 / 219, 255 / 224)
    to_red, to_blue = 2 * (1 - red) * chroma, 2 * (1 - blue) * chroma
    return YuvToRgb(black, *map(_fixed, (luma, to_red, -to_red * red / green, -to_blue * blue / green, to_blue)))


_LUMA_SHARES = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}  # of red and blue: ITU-R BT.601-7, BT.709-6


def _fixed(weight: float) -> int:
    return round(weight * (1 << FRACTION_BITS))


def nv12_to_rgb(
    y: npt.NDArray[np.uint8], uv: npt.NDArray[np.uint8], *, matrix: YuvMatrix = "bt601", full_range: bool = False
) -> npt.NDArray[np.uint8]:
    """One frame: luma (H, W) u8 and chroma (H/2, W/2, 2) u8 → (H, W, 3) u8 RGB; `matrix` as in `yuv_to_rgb`.

    Raises:
        ShapeError: a plane is not of that shape and dtype, or a side is odd.
        OptionError: an unknown matrix.
    """
    check_nv12(y.shape, y.dtype.name, uv.shape, uv.dtype.name)
    to = yuv_to_rgb(matrix, full_range)
    luma = np.maximum(y.astype(np.int64) - to.black, 0) * to.luma
    chroma = uv.astype(np.int64).repeat(2, axis=0).repeat(2, axis=1) - 128  # (H, W, 2)
    u, v = chroma[..., 0], chroma[..., 1]
    rgb = np.stack(
        [luma + v * to.v_to_red, luma + v * to.v_to_green + u * to.u_to_green, luma + u * to.u_to_blue], axis=-1
    )
    return ((rgb + (1 << FRACTION_BITS - 1)) >> FRACTION_BITS).clip(0, 255).astype(np.uint8)


def check_nv12(y_shape: Any, y_dtype: str, uv_shape: Any, uv_dtype: str) -> None:
    """Raises `ShapeError` unless these are the two planes of one frame."""
    y_shape, uv_shape = tuple(y_shape), tuple(uv_shape)
    if len(y_shape) != 2 or y_dtype != "uint8" or min(y_shape) < 2 or y_shape[0] % 2 or y_shape[1] % 2:
        raise ShapeError(f"y: expected (H, W) uint8 with even sides of at least 2, got {y_shape} {y_dtype}")
    expected = (y_shape[0] // 2, y_shape[1] // 2, 2)
    if uv_shape != expected or uv_dtype != "uint8":
        raise ShapeError(f"uv: expected {expected} uint8 beside y {y_shape}, got {uv_shape} {uv_dtype}")
