"""The letterbox and the normalisation in NumPy: the definition that every fast version is tested against.

The letterbox is the square (or fixed-shape), centred one that YOLOv8 is trained and evaluated with
(ultralytics' `LetterBox(auto=False, center=True)`): aspect ratio kept, sides rounded to the nearest pixel
(halves to even), the odd pixel of padding below and to the right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["letterbox", "letterbox_geometry", "normalise", "resize_bilinear"]


def letterbox_geometry(image_hw: tuple[int, int], size_hw: tuple[int, int]) -> Letterbox:
    """Where an image of `image_hw` pixels lies in an input of `size_hw` pixels."""
    (image_h, image_w), (h, w) = image_hw, size_hw
    gain = min(h / image_h, w / image_w)
    # An image of 1 × 5000 would round to a side of nothing: one pixel is the least there is.
    new_h, new_w = max(1, round(image_h * gain)), max(1, round(image_w * gain))
    top, left = round((h - new_h) / 2 - 0.1), round((w - new_w) / 2 - 0.1)
    return Letterbox(image_hw, size_hw, (new_h, new_w), top, left, gain)


def resize_bilinear(image: npt.NDArray[np.uint8], size_hw: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Bilinear without antialias: pixel centres at halves, edges repeated, rounded half up. (H, W, 3) → (h, w, 3) u8."""

    def taps(
        length: int, source: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        position = (np.arange(length) + 0.5) * (source / length) - 0.5
        below = np.floor(position)
        first = np.clip(below, 0, source - 1).astype(np.intp)
        second = np.clip(below + 1, 0, source - 1).astype(np.intp)
        return first, second, position - below

    y0, y1, fy = taps(size_hw[0], image.shape[0])
    x0, x1, fx = taps(size_hw[1], image.shape[1])
    fy, fx = fy[:, None, None], fx[None, :, None]
    rows = image[y0] * (1 - fy) + image[y1] * fy  # (h, W, 3) f64
    mixed = rows[:, x0] * (1 - fx) + rows[:, x1] * fx  # (h, w, 3) f64
    return np.floor(mixed + 0.5).astype(np.uint8)


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
    """`(canvas / 255 - mean) / std`, planar: (h, w, 3) u8 → (3, h, w)."""
    mean, std = np.array(spec.mean, np.float64), np.array(spec.std, np.float64)
    return ((canvas / 255 - mean) / std).transpose(2, 0, 1).astype(dtype)
