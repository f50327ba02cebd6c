"""Where images lie in a square input, by each of the three ways that they come there."""

from __future__ import annotations

from visionfast.postprocess.enlarge import Resize
from visionfast.preprocess import antialias
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox, PreprocessSpec


def placed_in(size: int, image_hw: tuple[int, int], resize: Resize) -> Letterbox:
    if resize == "letterbox":
        return letterbox_geometry(image_hw, (size, size))
    spec = PreprocessSpec((size, size), resize, "bilinear-antialias", pad_value=None)
    return antialias.geometry(image_hw, spec)
