"""The fast CPU path: cv2 resizes straight into the engine's input buffer, and only the padding is filled."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["CpuPreprocessor"]


class CpuPreprocessor:
    """Writes images into slots of an input buffer. Stateless but for its spec."""

    def __init__(self, spec: PreprocessSpec) -> None:
        self.spec = spec

    def write(self, image: npt.NDArray[np.uint8], slot: npt.NDArray[np.uint8]) -> Letterbox:
        """Letterboxes `image` (H, W, 3) u8 into `slot` (h, w, 3) u8; every pixel of the slot is written."""
        geometry = letterbox_geometry(image.shape[:2], self.spec.size_hw)
        (new_h, new_w), top, left = geometry.resized_hw, geometry.top, geometry.left
        bottom, right = top + new_h, left + new_w
        inside = slot[top:bottom, left:right]
        if image.shape[:2] == geometry.resized_hw:
            inside[...] = image
        else:
            resized = cv2.resize(image, (new_w, new_h), dst=inside, interpolation=cv2.INTER_LINEAR)
            if not np.may_share_memory(resized, inside):  # cv2 makes a new array where it cannot use the view
                inside[...] = resized
        pad = self.spec.pad_value
        slot[:top], slot[bottom:] = pad, pad
        slot[top:bottom, :left], slot[top:bottom, right:] = pad, pad
        return geometry

    def normalise(self, canvas: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
        """(N, h, w, 3) u8 → `out` (N, 3, h, w) f32 or f16, normalised, for engines that take it so."""
        for pixels, planes in zip(canvas, out, strict=True):
            for plane, channel, mean, std in zip(
                planes, cv2.split(pixels), self.spec.mean, self.spec.std, strict=True
            ):
                np.multiply(channel, np.float32(1 / (255 * std)), out=plane, casting="unsafe")
                if mean:
                    plane -= np.float32(mean / std)
