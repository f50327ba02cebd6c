"""The antialiased resizes of SAM, SAM 2 and DINO in NumPy: the definition that every fast version is tested against.

SAM's and DINO's resize 8-bit pixels with Pillow (`Image.resize(…, BILINEAR)` and `BICUBIC`), whose fixed-point
arithmetic is repeated here to the last bit: rows, rounded and clipped to 8 bits, then columns. Pillow 13 takes the
columns first where it expects that to be faster (python-pillow/Pillow#9549; where the aspect ratio is kept, in images
more than twice as high as wide), so that single pixels of its result are another level. Here the order is that of all
Pillows before, which the networks were trained and published with, but for images so tall that it would cost gigabytes
(`rows_first`).

SAM 2's predictor resizes real numbers with torchvision (`Resize(antialias=True)`), in single precision. To 1024 × 1024
it is at most 3e-7 away from what is here, in units of 1.0 = level 255 (torch 2.14, noise of 60 sizes up to 3000 ×
3000); to sizes that are no powers of two, ten times as far, for it computes its positions in single precision too.

DINO's images are cropped after the resize, as torchvision does it (`Resize(256, BICUBIC)`, `CenterCrop(224)`). Only the
pixels that are kept are computed, with the weights of the whole: 1 × 100,000,000 pixels are not to become 256 ×
25,600,000,000.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import OptionError, ShapeError
from visionfast.preprocess.filters import FRACTION_BITS, Filter, cubic, fixed_point, triangle
from visionfast.preprocess.reference import normalise
from visionfast.types import Letterbox, PreprocessSpec

__all__ = [
    "check_image",
    "crop",
    "fit",
    "geometry",
    "padding",
    "resize_antialias_float",
    "resize_antialias_u8",
    "rows_first",
    "triangle",
    "window_of",
]

_HALFWAY_PIXELS = 1 << 25  # 100 MB: what is 150,000 pixels high may be made 224 wide


def geometry(image_hw: tuple[int, int], spec: PreprocessSpec) -> Letterbox:
    """Where an image of `image_hw` pixels lies in the network's input.

    `longest-side`: as SAM's `ResizeLongestSide` has it, halves rounded up; a side that would vanish has one pixel.
    `centre-crop`: as torchvision's `Resize(side)` and `CenterCrop` have it for squares: the longer side is rounded
    down, and half of what is cut off to the even number. Other inputs alike: the image just covers `cover_hw`.

    Raises:
        OptionError: `spec` is of another resize, `longest-side` with an input that is not square, or `centre-crop`
            without a `cover_hw` of at least `size_hw`.
        ShapeError: a side that is not at least 1.
    """
    (image_h, image_w), (h, w) = image_hw, spec.size_hw
    if min(image_h, image_w, h, w) < 1:
        raise ShapeError(f"image: expected sides of at least 1 pixel, got {image_hw} into {spec.size_hw}")
    match (spec.resize, spec.interpolation):
        case ("stretch", "bilinear-antialias" | "bicubic-antialias"):
            return Letterbox((image_h, image_w), (h, w), (h, w), 0, 0, min(h / image_h, w / image_w))
        case ("longest-side", "bilinear-antialias") if h == w:
            gain = h / max(image_h, image_w)
            new_h, new_w = max(1, int(image_h * gain + 0.5)), max(1, int(image_w * gain + 0.5))
            return Letterbox((image_h, image_w), (h, w), (new_h, new_w), 0, 0, gain)
        case ("centre-crop", "bicubic-antialias"):
            cover_h, cover_w = spec.cover_hw or (0, 0)
            if cover_h < h or cover_w < w:
                raise OptionError(f"preprocess: cover_hw: expected at least {spec.size_hw}, got {spec.cover_hw}")
            new_h = max(cover_h, int(cover_w * image_h / image_w))
            new_w = max(cover_w, int(cover_h * image_w / image_h))
            top, left = round((new_h - h) / 2), round((new_w - w) / 2)
            gain = max(cover_h / image_h, cover_w / image_w)
            return Letterbox((image_h, image_w), (h, w), (new_h, new_w), -top, -left, gain)
    raise OptionError(
        "preprocess: expected bilinear-antialias with stretch, or with longest-side into a square, "
        "or bicubic-antialias with stretch or centre-crop, "
        f"got {spec.interpolation} with {spec.resize} into {spec.size_hw}"
    )


def rows_first(image_hw: tuple[int, int], width: int) -> bool:
    """Whether an image's rows are made `width` pixels long before its columns are resized.

    Not where that would make so many more pixels that no one has the memory.
    """
    image_h, image_w = image_hw
    return width <= image_w or image_h * width <= _HALFWAY_PIXELS


def resize_antialias_u8(
    image: npt.NDArray[np.uint8],
    size_hw: tuple[int, int],
    weigh: Filter = triangle,
    *,
    window: tuple[slice, slice] | None = None,
) -> npt.NDArray[np.uint8]:
    """Pillow's two passes, each rounded to 8 bits (halves up) and clipped: (H, W, C) u8 → (h, w, C) u8.

    Args:
        image: pixels.
        size_hw: of the whole result.
        weigh: `triangle` or `cubic`.
        window: the rows and columns of the result that are wanted, with their ends; default: all.
    """
    kept = window or (slice(0, size_hw[0]), slice(0, size_hw[1]))
    start, real = weigh(size_hw[0], image.shape[0], kept[0].start, kept[0].stop)
    image = image[start[0] : start[-1] + real.shape[1]]  # only these rows count
    down = (start - start[0], real)
    across = weigh(size_hw[1], image.shape[1], kept[1].start, kept[1].stop)
    passes = [(1, *across), (0, *down)]
    if not rows_first(image.shape[:2], kept[1].stop - kept[1].start):
        passes.reverse()
    for axis, first, weights in passes:
        sums = _weighted(image.astype(np.int64), first, fixed_point(weights), axis)
        image = np.clip((sums + (1 << FRACTION_BITS - 1)) >> FRACTION_BITS, 0, 255).astype(np.uint8)
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


def crop(image: npt.NDArray[np.uint8], spec: PreprocessSpec) -> tuple[npt.NDArray[np.uint8], Letterbox]:
    """An image as DINO looks at it, `centre-crop` or `stretch`: (H, W, 3) u8 → (h, w, 3) u8, and where it lies.

    Raises:
        ShapeError: the image is not (H, W, 3) u8 with at least one pixel.
        OptionError: `spec` is of another resize.
    """
    check_image(image)
    placed = geometry(image.shape[:2], spec)
    if spec.interpolation != "bicubic-antialias":
        raise OptionError(f"preprocess: expected bicubic-antialias, got {spec.interpolation}")
    return resize_antialias_u8(image, placed.resized_hw, cubic, window=window_of(placed)), placed


def window_of(placed: Letterbox) -> tuple[slice, slice]:
    """The rows and the columns of the resized image that are the network's input, where none are padded."""
    (h, w), top, left = placed.size_hw, -placed.top, -placed.left
    return slice(top, top + h), slice(left, left + w)


def fit(image: npt.NDArray[np.uint8], spec: PreprocessSpec) -> tuple[npt.NDArray[np.float32], Letterbox]:
    """An image as the network takes it: resized, normalised, padded. (H, W, 3) u8 → (3, h, w) f32, and where it lies.

    The padding is 0 after normalisation, or grey of the level `spec.pad_value`.

    Raises:
        ShapeError: the image is not (H, W, 3) u8 with at least one pixel.
        OptionError: as for `geometry`.
    """
    check_image(image)
    if spec.interpolation == "bicubic-antialias":
        canvas, placed = crop(image, spec)
        return normalise(canvas, spec), placed
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
