"""The fast CPU path of DINO: only what the network looks at is computed, by products of matrices.

The pixels and weights are integers: in double precision a BLAS adds up their products without an error, in whatever
order, so that the result is Pillow's fixed-point arithmetic to the last bit. Pillow itself can resize a part of an
image, but rounds to single precision where the part begins, and with that the weights are others.

To the middle 224 × 224 of 256 this takes 1.9 ms of one thread for 640×480, 6.8 for 1080p and 41 for 12 megapixels,
where Pillow's resize and crop take 2.7, 14 and 100 (medians of processor time on a shared machine, NumPy 2.4 and
Pillow 13). No image is dear to crop; the dearest to squash, 1 × 100,000,000, takes some 15 s for its 400 million
weights, which Pillow has no memory for.
"""

from __future__ import annotations

from typing import Any, cast

import cv2
import numpy as np
import numpy.typing as npt

from visionfast.errors import OptionError
from visionfast.preprocess.antialias import check_image, geometry, rows_first, window_of
from visionfast.preprocess.bands import Band, BandedResize
from visionfast.preprocess.filters import cubic
from visionfast.preprocess.levels import LevelTables, check_array
from visionfast.products import product
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["CropPreprocessor"]

_BAND = 8  # rows of a band; with fewer, pixels are converted more often, with more, more zeros are multiplied
_STRIP = 1 << 17  # pixels that are converted at once: a megabyte, which stays in a core's cache
_TURNED = 1 << 20  # bytes that are turned over at once, for the same reason


class CropPreprocessor:
    """Brings images to the network's size, by `centre-crop` or `stretch`. Keeps no image; safe for several threads.

    Equal to `preprocess.antialias.crop` and `preprocess.reference.normalise` to the bit.

    Raises:
        OptionError: `spec` is of another resize.
    """

    def __init__(self, spec: PreprocessSpec) -> None:
        geometry((1, 1), spec)  # raises for a resize that is not there
        if spec.interpolation != "bicubic-antialias":
            raise OptionError(f"preprocess: expected bicubic-antialias, got {spec.interpolation}")
        self.spec = spec
        self._levels = LevelTables(spec)

    def write(self, image: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> Letterbox:
        """`image` (H, W, 3) u8 RGB → `out` (h, w, 3) u8; every element of it is written.

        Raises:
            ShapeError: `image` or `out` is not of that shape and dtype, or `out` is not C-contiguous.
        """
        check_image(image)
        check_array(out, "out", (*self.spec.size_hw, 3), (np.uint8,))
        placed = geometry(image.shape[:2], self.spec)
        down, across = (
            BandedResize(cubic, length, source, _BAND, (kept.start, kept.stop), fixed=True)
            for length, source, kept in zip(placed.resized_hw, placed.image_hw, window_of(placed), strict=True)
        )
        rows = down.touched()
        h, w = self.spec.size_hw
        if rows_first((rows.stop - rows.start, image.shape[1]), w):
            halfway = np.empty((rows.stop - rows.start, w, 3), np.uint8)
            _resize_rows(image[rows], across, halfway)
            _resize_columns(halfway, down, rows.start, out)
        else:
            halfway = np.empty((h, image.shape[1], 3), np.uint8)
            _resize_columns(image[rows], down, rows.start, halfway)
            _resize_rows(halfway, across, out)
        return placed

    def normalise(self, canvas: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
        """(N, h, w, 3) u8 → `out` (N, 3, h, w) f32 or f16, for engines that take their input normalised.

        Raises:
            ShapeError: `canvas` or `out` is not of that shape and dtype, or not C-contiguous.
        """
        self._levels.normalise(canvas, out)

    def normalised(self, images: npt.NDArray[np.uint8], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """`normalise` into a new array, float32 or float16."""
        out = np.empty((len(images), 3, *self.spec.size_hw), dtype)
        self._levels.normalise(images, out)
        return out


def _resize_rows(image: npt.NDArray[np.uint8], resize: BandedResize, out: npt.NDArray[np.uint8]) -> None:
    """(R, W, 3) u8 → `out` (R, n, 3) u8."""
    if resize.changes_nothing:
        out[...] = image[:, resize.touched()]
        return
    for group in resize.groups():
        begin, end = group[0].taken.start, group[-1].taken.stop
        made = slice(group[0].made.start, group[-1].made.stop)
        size = max(1, _TURNED // (3 * (end - begin)))
        for first in range(0, len(image), size):
            part = np.s_[first : first + size]
            turned = _turned(image[part, begin:end])  # (taken, rows, 3)
            columns = np.empty((made.stop - made.start, *turned.shape[1:]), np.uint8)
            _multiply(group, turned, begin, columns)
            out[part, made] = _turned(columns)


def _resize_columns(image: npt.NDArray[np.uint8], resize: BandedResize, begin: int, out: npt.NDArray[np.uint8]) -> None:
    """(R, W, 3) u8, rows `begin` and those below of an image, → `out` (n, W, 3) u8."""
    if resize.changes_nothing:
        out[...] = image
        return
    for group in resize.groups():
        _multiply(group, image, begin, out[group[0].made.start : group[-1].made.stop])


def _multiply(group: tuple[Band, ...], image: npt.NDArray[np.uint8], begin: int, out: npt.NDArray[np.uint8]) -> None:
    """Bands that follow each other, times rows `begin` and below of an image: (R, W, 3) u8 → `out` (n, W, 3) u8."""
    pixels, result = image.reshape(len(image), -1), out.reshape(len(out), -1)  # (R, M), (n, M)
    deepest = max(band.weights.shape[1] for band in group)
    width = max(1, min(_STRIP // deepest, pixels.shape[1]))
    strip, sums = np.empty(deepest * width), np.empty((_BAND, width))
    first = group[0].made.start
    for left in range(0, pixels.shape[1], width):
        columns = np.s_[left : min(left + width, pixels.shape[1])]
        n = columns.stop - left
        for band in group:
            m, k = band.weights.shape
            real = strip[: k * n].reshape(k, n)
            real[...] = pixels[band.taken.start - begin : band.taken.stop - begin, columns]
            made = sums[:m, :n]
            product(band.weights, real, made)
            made += 0.5
            # The conversion to integers rounds towards 0, so this is: halves up, and clipped.
            result[band.made.start - first : band.made.stop - first, columns] = np.clip(made, 0, 255.5, out=made)
    assert np.shares_memory(result, out)


def _turned(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(R, W, 3) → (W, R, 3), C-contiguous."""
    turned = image.transpose(1, 0, 2)
    if turned.flags.c_contiguous:  # a single row or column
        return turned
    if image.strides[0] < 0 or image.strides[1:] != (3, 1):
        image = np.ascontiguousarray(image)
    return cast(npt.NDArray[np.uint8], cv2.transpose(image))
