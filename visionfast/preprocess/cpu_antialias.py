"""The fast CPU path of SAM and SAM 2: Pillow or two products of matrices, written straight into the encoder's input.

`longest-side` is Pillow's own arithmetic, so Pillow computes it, and a table normalises its 8 bits.

`stretch` is in real numbers. A resize is a product with a matrix from either side, and a few rows of that matrix are
zero outside a narrow band: the bands go to the BLAS. Neighbouring bands share the pixels under both; bands of 8 rows
where the image itself is read, since its pixels have to be converted, and of 32 behind that were fastest. To 1024 ×
1024 this takes 18 ms of one thread for 640×480, 46 for 1080p and 87 for 12 megapixels, where Pillow's mode `F` takes
33, 80 and 233 (medians of processor time on a shared machine, NumPy 2.4 and Pillow 13). OpenCV has no such filter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from visionfast.errors import ShapeError
from visionfast.preprocess.antialias import check_image, geometry, padding, triangle
from visionfast.preprocess.reference import normalise
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["AntialiasPreprocessor"]


class AntialiasPreprocessor:
    """Writes images into the encoder's input. Keeps no image; not for several threads at once.

    `longest-side` equals `preprocess.antialias.fit` to the bit. `stretch` is within 1e-6 of it, in units of 1.0 =
    level 255 before the division by std; float16 is this, rounded.

    Raises:
        OptionError: `spec` is of another resize.
    """

    def __init__(self, spec: PreprocessSpec) -> None:
        geometry((1, 1), spec)  # raises for a resize that is not done here
        self.spec = spec
        self._padding = padding(spec)  # (3,)
        levels = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)  # (1, 256, 3)
        self._tables = {
            np.dtype(dtype): normalise(levels, spec, dtype)[:, 0]  # (3, 256)
            for dtype in (np.float32, np.float16)
        }
        std = np.array(spec.std)
        self._gain = (1 / (255 * std)).astype(np.float32)
        self._offset = (np.array(spec.mean) / std).astype(np.float32)
        self._levels, self._strip, self._halfway = _Scratch(np.uint8), _Scratch(np.float32), _Scratch(np.float32)
        self._plane = _Scratch(np.float32)

    def write(self, image: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> Letterbox:
        """`image` (H, W, 3) u8 RGB → `out` (3, h, w) or (1, 3, h, w) f32 or f16; every element of it is written.

        Raises:
            ShapeError: `image` or `out` is not of that shape and dtype, or `out` is not C-contiguous.
        """
        check_image(image)
        planes = self._planes_of(out)
        placed = geometry(image.shape[:2], self.spec)
        image = np.ascontiguousarray(image)
        if self.spec.resize == "stretch":
            self._stretch(image, planes)
            return placed
        self._longest_side(image, placed, planes)
        new_h, new_w = placed.resized_hw
        planes[:, new_h:] = self._padding[:, None, None]
        planes[:, :new_h, new_w:] = self._padding[:, None, None]
        return placed

    def _planes_of(self, out: npt.NDArray[Any]) -> npt.NDArray[Any]:
        expected = (3, *self.spec.size_hw)
        if out.shape not in (expected, (1, *expected)) or out.dtype not in (np.float32, np.float16):
            raise ShapeError(f"out: expected {expected} float32 or float16, got {out.shape} {out.dtype.name}")
        if not out.flags.c_contiguous:
            raise ShapeError(f"out: expected a C-contiguous array, got strides {out.strides}")
        return out.reshape(expected)

    def _longest_side(self, image: npt.NDArray[np.uint8], placed: Letterbox, planes: npt.NDArray[Any]) -> None:
        new_h, new_w = placed.resized_hw
        tables = self._tables[planes.dtype]
        if planes.dtype == np.float16:  # cv2 has no tables of halves; it only moves their bits
            tables, planes = tables.view(np.int16), planes.view(np.int16)
        for channel, table, plane in zip(self._resized(image, placed), tables, planes, strict=True):
            inside = plane[:new_h, :new_w]
            looked_up = cv2.LUT(channel, table, dst=inside)
            assert looked_up is inside  # cv2 makes a new array, silently, where size or dtype do not fit

    def _resized(self, image: npt.NDArray[np.uint8], placed: Letterbox) -> Iterator[npt.NDArray[np.uint8]]:
        """The three channels of the resized image, (new_h, new_w) u8 each."""
        new_h, new_w = placed.resized_hw
        if placed.image_hw == placed.resized_hw:
            for i in range(3):
                yield self._channel(image, i)
            return
        # A call for each pass: of both at once, Pillow 13 chooses the order, and with it the last bit of the result.
        rows = Image.fromarray(image).resize((new_w, image.shape[0]), Image.Resampling.BILINEAR)
        # Pillow hands out three channels faster than one image of three, and so they are needed.
        for channel in rows.resize((new_w, new_h), Image.Resampling.BILINEAR).split():
            yield np.asarray(channel)

    def _stretch(self, image: npt.NDArray[np.uint8], planes: npt.NDArray[Any]) -> None:
        (image_h, image_w), (h, w) = image.shape[:2], self.spec.size_hw
        # Whole rows are read faster than strips of columns. But where they leave far more halfway, columns come first:
        # 1 × 100,000,000 pixels are not to become 1024 × 100,000,000.
        rows_first = h * image_w <= 4 * image_h * w
        resized = self._plane.of((h, w))
        for i, plane in enumerate(planes):
            if rows_first:
                halfway = self._halfway.of((h, image_w))
                for band in _bands(h, image_h, 8):
                    _product(band.weights, self._real(image[band.taken], i), halfway[band.made])
                for band in _bands(w, image_w, 32):
                    _product(halfway[:, band.taken], band.weights.T, resized[:, band.made])
            else:
                halfway = self._halfway.of((image_h, w))
                for band in _bands(w, image_w, 8):
                    _product(self._real(image[:, band.taken], i), band.weights.T, halfway[:, band.made])
                for band in _bands(h, image_h, 32):
                    _product(band.weights, halfway[band.taken], resized[band.made])
            resized *= self._gain[i]
            np.subtract(resized, self._offset[i], out=plane, casting="same_kind")

    def _channel(self, image: npt.NDArray[np.uint8], index: int) -> npt.NDArray[np.uint8]:
        """One channel of (n, m, 3) u8, in a buffer that the next call overwrites."""
        channel = self._levels.of(image.shape[:2])
        extracted = cv2.extractChannel(image, index, dst=channel)
        assert extracted is channel
        return channel

    def _real(self, image: npt.NDArray[np.uint8], index: int) -> npt.NDArray[np.float32]:
        """The same as float32, 0..255."""
        real = self._strip.of(image.shape[:2])
        real[...] = self._channel(image, index)
        return real


class _Scratch:
    """One buffer for arrays of changing shape: it grows, and what it held before is lost."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._buffer: npt.NDArray[Any] = np.empty(0, dtype)

    def of(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        size = math.prod(shape)
        if size > self._buffer.size:
            self._buffer = np.empty(size, self._buffer.dtype)
        return self._buffer[:size].reshape(shape)


# ---- a resize as a product with a banded matrix -----------------------------------------------------------

_LONG = 1 << 16  # a longer side than a JPEG's: its matrix is made band by band, and not kept

# OpenBLAS computes a product of no more than 2^18 multiplications on the calling thread. It shares out a larger one to
# threads that spin until they are all done: where other work had the cores, 12 megapixels took 4.3 s instead of 0.35.
_ONE_THREAD = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    """Some of a resize's rows: `result[made] = weights @ source[taken]`."""

    made: slice
    taken: slice
    weights: npt.NDArray[np.float32]


def _bands(length: int, source: int, size: int) -> Iterable[_Band]:
    """The bands of at most `size` rows of the matrix that makes `length` pixels from `source`."""
    return _made_bands(length, source, 1) if source > _LONG else _kept_bands(length, source, size)


def _made_bands(length: int, source: int, size: int) -> Iterator[_Band]:
    for first in range(0, length, size):
        last = min(first + size, length)
        start, weights = triangle(length, source, first, last)  # (n,), (n, K)
        offset = start - start[0]
        band = np.zeros((last - first, offset[-1] + weights.shape[1]), np.float32)
        np.put_along_axis(band, offset[:, None] + np.arange(weights.shape[1]), weights.astype(np.float32), axis=1)
        taken = slice(int(start[0]), min(int(start[0]) + band.shape[1], source))
        yield _Band(slice(first, last), taken, band[:, : taken.stop - taken.start])  # weights beyond the image are 0


@functools.lru_cache(maxsize=8)
def _kept_bands(length: int, source: int, size: int) -> tuple[_Band, ...]:
    return tuple(_made_bands(length, source, size))


def _product(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
    """`out = a @ b`, (m, k) and (k, n), in pieces that the BLAS does not share out to threads of its own."""
    (m, k), n = a.shape, b.shape[1]
    if m > n:
        piece = max(1, _ONE_THREAD // (k * n))
        for i in range(0, m, piece):
            np.matmul(a[i : i + piece], b, out=out[i : i + piece])
    else:
        piece = max(1, _ONE_THREAD // (k * m))
        for i in range(0, n, piece):
            np.matmul(a, b[:, i : i + piece], out=out[:, i : i + piece])
