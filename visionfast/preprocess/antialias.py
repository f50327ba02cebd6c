"""The antialiased resizes of SAM and SAM 2 in NumPy: the definition that every fast version is tested against.

A triangle filter as wide as the reduction, pixel centres at halves; what would lie outside the image is left out and
the other weights scaled to a sum of 1.

SAM's predictor resizes 8-bit pixels with Pillow (`Image.resize(…, BILINEAR)`, `src/libImaging/Resample.c`), whose
fixed-point arithmetic is repeated here to the last bit: rows, rounded to 8 bits, then columns. Pillow 13 takes the
columns first where it expects that to be faster (tall images; python-pillow/Pillow#9549), so that single pixels of its
result are another level. Here the order is that of all Pillows before, which SAM was trained and published with.

SAM 2's predictor resizes real numbers with torchvision (`Resize(antialias=True)`), in single precision. To 1024 × 1024
it is at most 3e-7 away from what is here, in units of 1.0 = level 255 (torch 2.14, noise of 60 sizes up to 3000 ×
3000); to sizes that are no powers of two, ten times as far, for it computes its positions in single precision too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import OptionError, ShapeError
from visionfast.preprocess.reference import normalise
from visionfast.types import Letterbox, PreprocessSpec

__all__ = [
    "check_image",
    "fit",
    "geometry",
    "padding",
    "resize_antialias_float",
    "resize_antialias_u8",
    "triangle",
]

_FRACTION_BITS = 22  # of Pillow's weights: 32, less 8 of the pixel and 2 to spare


def geometry(image_hw: tuple[int, int], spec: PreprocessSpec) -> Letterbox:
    """Where an image of `image_hw` pixels lies in the network's input.

    `longest-side`: as SAM's `ResizeLongestSide` has it, halves rounded up; a side that would vanish has one pixel.

    Raises:
        OptionError: `spec` is of another resize, or `longest-side` with an input that is not square.
        ShapeError: a side that is not at least 1.
    """
    (image_h, image_w), (h, w) = image_hw, spec.size_hw
    if min(image_h, image_w, h, w) < 1:
        raise ShapeError(f"image: expected sides of at least 1 pixel, got {image_hw} into {spec.size_hw}")
    if spec.interpolation == "bicubic-antialias" and spec.resize == "centre-crop" and spec.cover_hw is not None:
        cover_h, cover_w = spec.cover_hw
        # torchvision's `Resize(side)` of a square, and `CenterCrop`: what is longer is rounded down, halves to even.
        if cover_h * image_w >= cover_w * image_h:
            new_h, new_w = cover_h, int(cover_h * image_w / image_h)
        else:
            new_h, new_w = int(cover_w * image_h / image_w), cover_w
        top, left = round((new_h - h) / 2), round((new_w - w) / 2)
        return Letterbox((image_h, image_w), (h, w), (new_h, new_w), -top, -left, new_h / image_h)
    if spec.resize == "stretch" and spec.interpolation in ("bilinear-antialias", "bicubic-antialias"):
        return Letterbox((image_h, image_w), (h, w), (h, w), 0, 0, min(h / image_h, w / image_w))
    if spec.interpolation == "bilinear-antialias" and spec.resize == "longest-side" and h == w:
        gain = h / max(image_h, image_w)
        new_h, new_w = max(1, int(image_h * gain + 0.5)), max(1, int(image_w * gain + 0.5))
        return Letterbox((image_h, image_w), (h, w), (new_h, new_w), 0, 0, gain)
    raise OptionError(
        "preprocess: expected bilinear-antialias with stretch, or with longest-side into a square, "
        f"got {spec.interpolation} with {spec.resize} into {spec.size_hw}"
    )


def triangle(
    length: int, source: int, first: int = 0, last: int | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The filter's weights for output pixels `first` to `last` of `length`, made from `source` pixels.

    Returns:
        start: (n,) the first pixel that counts for each; never falls from one to the next.
        weights: (n, K) of that pixel and those behind it, each row with a sum of 1. Beyond the filter, and so beyond
            the image, they are 0.
    """
    scale = source / length
    width = max(scale, 1.0)  # half the filter's; an enlargement interpolates between two neighbours
    centre = (np.arange(first, length if last is None else last) + 0.5) * scale
    start = np.maximum((centre - width + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + width + 0.5).astype(np.int64), source)
    pixels = start[:, None] + np.arange((end - start).max())  # (n, K)
    weights = np.maximum(1 - np.abs((pixels - centre[:, None] + 0.5) * (1 / width)), 0)
    weights[pixels >= end[:, None]] = 0
    # One after the other, as Pillow adds them up: another order may differ in the last bit.
    return start, weights / np.add.accumulate(weights, axis=1)[:, -1:]


def resize_antialias_u8(image: npt.NDArray[np.uint8], size_hw: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Pillow's two passes, rows and then columns, each rounded to 8 bits (halves up): (H, W, C) u8 → (h, w, C) u8."""
    for axis in (1, 0):
        start, real = triangle(size_hw[axis], image.shape[axis])
        weights = (0.5 + real * (1 << _FRACTION_BITS)).astype(np.int64)
        sums = _weighted(image.astype(np.int64), start, weights, axis)
        image = np.clip((sums + (1 << _FRACTION_BITS - 1)) >> _FRACTION_BITS, 0, 255).astype(np.uint8)
    return image


def resize_antialias_float(image: npt.NDArray[Any], size_hw: tuple[int, int]) -> npt.NDArray[np.float64]:
    """The same filter in real numbers, nothing rounded: (H, W, C) → (h, w, C) f64."""
    resized = image.astype(np.float64)
    for axis in (1, 0):
        resized = _weighted(resized, *triangle(size_hw[axis], image.shape[axis]), axis)
    return resized


def _weighted(
    pixels: npt.NDArray[Any], start: npt.NDArray[np.int64], weights: npt.NDArray[Any], axis: int
) -> npt.NDArray[Any]:
    """Along `axis` (0 or 1) of (H, W, C), for each output pixel the weighted sum of its pixels."""
    along = (-1, 1, 1) if axis == 0 else (1, -1, 1)
    total = np.zeros((*pixels.shape[:axis], len(start), *pixels.shape[axis + 1 :]), pixels.dtype)
    for k, weight in enumerate(weights.T):
        # Beyond the image the weight is 0, and any pixel will do.
        taken = np.take(pixels, np.minimum(start + k, pixels.shape[axis] - 1), axis)
        total += taken * weight.reshape(along)
    return total


def fit(image: npt.NDArray[np.uint8], spec: PreprocessSpec) -> tuple[npt.NDArray[np.float32], Letterbox]:
    """An image as the network takes it: resized, normalised, padded. (H, W, 3) u8 → (3, h, w) f32, and where it lies.

    The padding is 0 after normalisation, or grey of the level `spec.pad_value`.

    Raises:
        ShapeError: the image is not (H, W, 3) u8 with at least one pixel.
        OptionError: as for `geometry`.
    """
    check_image(image)
    placed = geometry(image.shape[:2], spec)
    resize: Callable[..., npt.NDArray[Any]] = (
        resize_antialias_float if spec.resize == "stretch" else resize_antialias_u8
    )
    tensor = np.empty((3, *spec.size_hw), np.float32)
    tensor[...] = padding(spec)[:, None, None]
    new_h, new_w = placed.resized_hw
    tensor[:, :new_h, :new_w] = normalise(resize(image, placed.resized_hw), spec)
    return tensor, placed


def padding(spec: PreprocessSpec) -> npt.NDArray[np.float32]:
    """(3,) what the padding is in each channel of the tensor."""
    if spec.pad_value is None:
        return np.zeros(3, np.float32)
    grey: npt.NDArray[np.float32] = normalise(np.full((1, 1, 3), spec.pad_value, np.uint8), spec)[:, 0, 0]
    return grey


def check_image(image: npt.NDArray[Any]) -> None:
    """Raises `ShapeError` unless it is (H, W, 3) uint8 with at least one pixel."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
        raise ShapeError(f"image: expected (H, W, 3) uint8, got {image.shape} {image.dtype.name}")
