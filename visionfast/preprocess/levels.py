"""Normalisation by table: eight bits have 256 values, and a table of the definition's own results is exact."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.preprocess.reference import normalise
from visionfast.types import PreprocessSpec

__all__ = ["LevelTables", "check_array"]


class LevelTables:
    """`preprocess.reference.normalise` for float32 and float16, to the bit. Keeps nothing; for any number of threads.

    Raises:
        ShapeError: an array is not of its shape and dtype, or not C-contiguous.
    """

    def __init__(self, spec: PreprocessSpec) -> None:
        levels = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)  # (1, 256, 3)
        self._size_hw = spec.size_hw
        self._tables = {
            np.dtype(dtype): normalise(levels, spec, dtype)[:, 0]  # (3, 256)
            for dtype in (np.float32, np.float16)
        }

    def planes(self, channels: Iterable[npt.NDArray[Any]], out: Iterable[npt.NDArray[Any]], dtype: Any) -> None:
        """Three channels (n, m) u8 → as many planes of that shape, each a part of an array of `dtype`."""
        tables = self._tables[np.dtype(dtype)]
        half = tables.dtype == np.float16
        for channel, table, plane in zip(channels, tables, out, strict=True):
            # cv2 has no tables of halves; it only moves their bits.
            seen, entries = (plane.view(np.int16), table.view(np.int16)) if half else (plane, table)
            looked_up = cv2.LUT(channel, entries, dst=seen)
            assert looked_up is seen  # cv2 makes a new array, silently, where size or dtype do not fit

    def normalise(
        self, canvas: npt.NDArray[np.uint8], out: npt.NDArray[Any], channels: list[npt.NDArray[np.uint8]] | None = None
    ) -> None:
        """(N, h, w, 3) u8 → `out` (N, 3, h, w) f32 or f16; `channels` are three (h, w) u8 to work in."""
        h, w = self._size_hw
        check_array(canvas, "canvas", (len(canvas), h, w, 3), (np.uint8,))
        check_array(out, "out", (len(canvas), 3, h, w), (np.float32, np.float16))
        for pixels, planes in zip(canvas, out, strict=True):
            self.planes(cv2.split(pixels, channels), planes, out.dtype)


def check_array(array: npt.NDArray[Any], name: str, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> None:
    """Raises `ShapeError` unless `array` is C-contiguous, of this shape and one of these dtypes."""
    if array.shape != shape or array.dtype not in dtypes:
        words = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ShapeError(f"{name}: expected {shape} {words}, got {array.shape} {array.dtype.name}")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name}: expected a C-contiguous array, got strides {array.strides}")
