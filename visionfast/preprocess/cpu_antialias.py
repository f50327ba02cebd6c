"""The fast CPU path of SAM and SAM 2: Pillow or two products of matrices, written straight into the encoder's input.

`longest-side` is Pillow's own arithmetic, so Pillow computes it, and a table normalises its 8 bits.

`stretch` is in real numbers. A resize is a product with a matrix from either side, and a few rows of that matrix are
zero outside a narrow band: the bands go to the BLAS. Neighbouring bands share the pixels under both; bands of 8 rows
where the image itself is read, since its pixels have to be converted, and of 32 behind that were fastest. To 1024 ×
1024 this takes 18 ms of one thread for 640×480, 46 for 1080p and 87 for 12 megapixels, where Pillow's mode `F` takes
33, 80 and 233 (medians of processor time on a shared machine, NumPy 2.4 and Pillow 13). OpenCV has no such filter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from visionfast.errors import OptionError, ShapeError
from visionfast.preprocess.antialias import check_image, geometry, padding
from visionfast.preprocess.bands import Band, BandedResize
from visionfast.preprocess.filters import triangle
from visionfast.preprocess.levels import LevelTables
from visionfast.products import product
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
        geometry((1, 1), spec)  # raises for a resize that is not there
        if spec.interpolation != "bilinear-antialias":
            raise OptionError(f"preprocess: expected bilinear-antialias, got {spec.interpolation}")
        self.spec = spec
        self._padding = padding(spec)  # (3,)
        self._levels = LevelTables(spec)
        std = np.array(spec.std)
        self._gain = (1 / (255 * std)).astype(np.float32)
        self._offset = (np.array(spec.mean) / std).astype(np.float32)
        self._bytes, self._strip, self._halfway = _Scratch(np.uint8), _Scratch(np.float32), _Scratch(np.float32)
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
        inside = planes[:, :new_h, :new_w]
        self._levels.planes(self._resized(image, placed), inside, planes.dtype)

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
                    product(band.weights, self._real(image[band.taken], i), halfway[band.made])
                for band in _bands(w, image_w, 32):
                    product(halfway[:, band.taken], band.weights.T, resized[:, band.made])
            else:
                halfway = self._halfway.of((image_h, w))
                for band in _bands(w, image_w, 8):
                    product(self._real(image[:, band.taken], i), band.weights.T, halfway[:, band.made])
                for band in _bands(h, image_h, 32):
                    product(band.weights, halfway[band.taken], resized[band.made])
            resized *= self._gain[i]
            np.subtract(resized, self._offset[i], out=plane, casting="same_kind")

    def _channel(self, image: npt.NDArray[np.uint8], index: int) -> npt.NDArray[np.uint8]:
        """One channel of (n, m, 3) u8, in a buffer that the next call overwrites."""
        channel = self._bytes.of(image.shape[:2])
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


def _bands(length: int, source: int, rows: int) -> Iterator[Band]:
    return BandedResize(triangle, length, source, rows).bands()
