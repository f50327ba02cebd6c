"""The letterbox and the normalisation in NumPy: the definition that every fast version is tested against.

The letterbox is the fixed-shape, centred one that YOLOv8 is trained and evaluated with (ultralytics'
`LetterBox(auto=False, center=True)`): aspect ratio kept, sides rounded to the nearest pixel (halves to even),
the odd pixel of padding below and to the right.

The resize is OpenCV's `INTER_LINEAR` on 8-bit images, which those networks were trained through, with its
fixed-point arithmetic (11-bit weights, two truncating shifts; `modules/imgproc/src/resize.cpp`): equal to it
to the last bit, and within one level of bilinear interpolation in real numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["letterbox", "letterbox_geometry", "normalise", "resize_bilinear"]

_ONE = 2048  # a weight of 1.0


def letterbox_geometry(image_hw: tuple[int, int], size_hw: tuple[int, int]) -> Letterbox:
    """Where an image of `image_hw` pixels lies in an input of `size_hw` pixels.

    Raises:
        ShapeError: a side that is not at least 1.
    """
    (image_h, image_w), (h, w) = image_hw, size_hw
    if min(image_h, image_w, h, w) < 1:
        raise ShapeError(f"letterbox: expected sides of at least 1 pixel, got {image_hw} into {size_hw}")
    gain = min(h / image_h, w / image_w)
    # An image of 1 × 5000 would round to a side of nothing: one pixel is the least there is.
    new_h, new_w = max(1, round(image_h * gain)), max(1, round(image_w * gain))
    top, left = round((h - new_h) / 2 - 0.1), round((w - new_w) / 2 - 0.1)
    return Letterbox((image_h, image_w), (h, w), (new_h, new_w), top, left, gain)


def resize_bilinear(image: npt.NDArray[np.uint8], size_hw: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Bilinear without antialias, pixel centres at halves, edges repeated: (H, W, 3) u8 → (h, w, 3) u8."""
    (image_h, image_w), (h, w) = image.shape[:2], size_hw
    y, y_weight = _positions(h, image_h)
    x, x_weight = _positions(w, image_w)
    x_weight[(x < 0) | (x >= image_w - 1)] = 0  # beyond the edge: the edge pixel with its whole weight
    left, right = np.clip(x, 0, image_w - 1), np.clip(x + 1, 0, image_w - 1)
    above, below = np.clip(y, 0, image_h - 1), np.clip(y + 1, 0, image_h - 1)

    pixels = image.astype(np.int64)
    rows = pixels[:, left] * _fixed(1 - x_weight)[:, None] + pixels[:, right] * _fixed(x_weight)[:, None]
    rows >>= 4  # (H, w, 3), 7 fractional bits
    upper = (rows[above] * _fixed(1 - y_weight)[:, None, None]) >> 16
    lower = (rows[below] * _fixed(y_weight)[:, None, None]) >> 16
    return ((upper + lower + 2) >> 2).astype(np.uint8)  # rounded half up from 2 fractional bits


def _positions(length: int, source: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """For each output pixel the source pixel before its centre, -1 to source - 1, and the part beyond it."""
    position = ((np.arange(length) + 0.5) * (source / length) - 0.5).astype(np.float32)
    before = np.floor(position)
    return before.astype(np.intp), position - before


def _fixed(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    fixed: npt.NDArray[np.int64] = np.rint(weight * np.float32(_ONE)).astype(np.int64)
    return fixed


def letterbox(image: npt.NDArray[np.uint8], spec: PreprocessSpec) -> tuple[npt.NDArray[np.uint8], Letterbox]:
    """An image inside the network's input: canvas (h, w, 3) u8 RGB, and where the image lies in it.

    Raises:
        ShapeError: the image is not (H, W, 3) u8 with at least one pixel.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
        raise ShapeError(f"image: expected (H, W, 3) uint8, got {image.shape} {image.dtype.name}")
    geometry = letterbox_geometry(image.shape[:2], spec.size_hw)
    (new_h, new_w), top, left = geometry.resized_hw, geometry.top, geometry.left
    canvas = np.full((*spec.size_hw, 3), spec.pad_value, np.uint8)
    canvas[top : top + new_h, left : left + new_w] = resize_bilinear(image, geometry.resized_hw)
    return canvas, geometry


def normalise(
    canvas: npt.NDArray[np.uint8], spec: PreprocessSpec, dtype: npt.DTypeLike = np.float32
) -> npt.NDArray[Any]:
    """`(canvas / 255 - mean) / std` in double precision, rounded once: (h, w, 3) u8 → (3, h, w)."""
    mean, std = np.array(spec.mean, np.float64), np.array(spec.std, np.float64)
    return ((canvas / 255 - mean) / std).transpose(2, 0, 1).astype(dtype)
