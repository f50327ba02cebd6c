"""The fast CPU path: cv2 resizes straight into the engine's input buffer, and only the padding is filled."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.preprocess.levels import LevelTables, check_array
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["CpuPreprocessor"]


class CpuPreprocessor:
    """Writes images into slots of an input buffer. Keeps no image; not for several threads at once.

    Equal to `preprocess.reference.letterbox` and `.normalise`.
    """

    def __init__(self, spec: PreprocessSpec) -> None:
        self.spec = spec
        self._levels = LevelTables(spec)
        self._planes = [np.empty(spec.size_hw, np.uint8) for _ in range(3)]

    def write(self, image: npt.NDArray[np.uint8], slot: npt.NDArray[np.uint8]) -> Letterbox:
        """Letterboxes `image` (H, W, 3) u8 into `slot` (h, w, 3) u8; every pixel of the slot is written.

        Raises:
            ShapeError: `image` or `slot` is not of that shape and dtype, or `slot` is not C-contiguous.
        """
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
            raise ShapeError(f"image: expected (H, W, 3) uint8, got {image.shape} {image.dtype.name}")
        check_array(slot, "slot", (*self.spec.size_hw, 3), (np.uint8,))
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
        self._levels.normalise(canvas, out, self._planes)
