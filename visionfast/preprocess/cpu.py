"""The fast CPU path: cv2 resizes straight into the engine's input buffer, and only the padding is filled."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.preprocess.reference import letterbox_geometry, normalise
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["CpuPreprocessor"]


class CpuPreprocessor:
    """Writes images into slots of an input buffer. Keeps no image; not for several threads at once.

    Equal to `preprocess.reference.letterbox` and `.normalise`.
    """

    def __init__(self, spec: PreprocessSpec) -> None:
        self.spec = spec
        # Eight bits have 256 values: a table of the definition's own results is exact and the fastest way.
        levels = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)  # (1, 256, 3)
        self._tables = {
            np.dtype(dtype): normalise(levels, spec, dtype)[:, 0]  # (3, 256)
            for dtype in (np.float32, np.float16)
        }
        self._planes = [np.empty(spec.size_hw, np.uint8) for _ in range(3)]

    def write(self, image: npt.NDArray[np.uint8], slot: npt.NDArray[np.uint8]) -> Letterbox:
        """Letterboxes `image` (H, W, 3) u8 into `slot` (h, w, 3) u8; every pixel of the slot is written.

        Raises:
            ShapeError: `image` or `slot` is not of that shape and dtype, or `slot` is not C-contiguous.
        """
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
            raise ShapeError(f"image: expected (H, W, 3) uint8, got {image.shape} {image.dtype.name}")
        _check(slot, "slot", (*self.spec.size_hw, 3), (np.uint8,))
        geometry = letterbox_geometry(image.shape[:2], self.spec.size_hw)
        (new_h, new_w), top, left = geometry.resized_hw, geometry.top, geometry.left
        bottom, right = top + new_h, left + new_w
        inside = slot[top:bottom, left:right]
        if image.shape[:2] == geometry.resized_hw:
            inside[...] = image
        else:
            resized = cv2.resize(
                np.ascontiguousarray(image), (new_w, new_h), dst=inside, interpolation=cv2.INTER_LINEAR
            )
            assert resized is inside  # cv2 makes a new array, silently, where size or dtype do not fit
        pad = self.spec.pad_value
        assert pad is not None  # a letterbox has one: engine.json is checked for it
        slot[:top], slot[bottom:] = pad, pad
        slot[top:bottom, :left], slot[top:bottom, right:] = pad, pad
        return geometry

    def normalise(self, canvas: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
        """(N, h, w, 3) u8 → `out` (N, 3, h, w) f32 or f16, for engines that take their input normalised.

        Raises:
            ShapeError: `canvas` or `out` is not of that shape and dtype, or not C-contiguous.
        """
        h, w = self.spec.size_hw
        _check(canvas, "canvas", (len(canvas), h, w, 3), (np.uint8,))
        _check(out, "out", (len(canvas), 3, h, w), (np.float32, np.float16))
        tables = self._tables[out.dtype]
        if out.dtype == np.float16:  # cv2 has no tables of halves; it only moves their bits
            tables, out = tables.view(np.int16), out.view(np.int16)
        for pixels, planes in zip(canvas, out, strict=True):
            for channel, table, plane in zip(cv2.split(pixels, self._planes), tables, planes, strict=True):
                looked_up = cv2.LUT(channel, table, dst=plane)
                assert looked_up is plane


def _check(array: npt.NDArray[Any], name: str, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> None:
    if array.shape != shape or array.dtype not in dtypes:
        words = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ShapeError(f"{name}: expected {shape} {words}, got {array.shape} {array.dtype.name}")
    if not array.flags.c_contiguous:
        raise ShapeError(f"{name}: expected a C-contiguous array, got strides {array.strides}")
