"""DINO's preprocessing on a CPU: Pillow resizes, and the middle is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from visionfast.preprocess.antialias import check_image, geometry
from visionfast.preprocess.reference import normalise
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["CropPreprocessor"]


class CropPreprocessor:
    """Brings images to the network's size. Keeps nothing; safe for several threads."""

    def __init__(self, spec: PreprocessSpec) -> None:
        geometry((1, 1), spec)
        self.spec = spec

    def write(self, image: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> Letterbox:
        """`image` (H, W, 3) u8 RGB → `out` (h, w, 3) u8; every element of it is written."""
        check_image(image)
        placed = geometry(image.shape[:2], self.spec)
        (new_h, new_w), (h, w) = placed.resized_hw, self.spec.size_hw
        rows = Image.fromarray(image).resize((new_w, image.shape[0]), Image.Resampling.BICUBIC)
        resized = np.asarray(rows.resize((new_w, new_h), Image.Resampling.BICUBIC))
        out[...] = resized[-placed.top : -placed.top + h, -placed.left : -placed.left + w]
        return placed

    def normalised(self, images: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
        """(N, h, w, 3) u8 → (N, 3, h, w) of `dtype`, for engines that take their input normalised."""
        return np.stack([normalise(image, self.spec, np.dtype(dtype)) for image in images])
