"""The steps of one image's way, as both layouts take them; the same calls as `sessions.host` makes."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError
from visionfast.postprocess.detections import postprocess
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.types import Letterbox

__all__ = ["SAMPLE", "objects_in", "place"]

SAMPLE = bytes.fromhex("424d3a0000000000000036000000280000000100000001000000010018000000000004000000") + bytes(20)
"""A BMP of one pixel, to warm up with."""


def place(
    image: bytes | ImageError, preprocessor: CpuPreprocessor, slot: npt.NDArray[np.uint8], limits: DecodeLimits
) -> tuple[Letterbox, dict[str, int]]:
    """Decodes and letterboxes into `slot` (h, w, 3) u8; where it lies, and each stage's nanoseconds.

    Raises:
        ImageError: it cannot be used; `slot` is as it was.
    """
    if isinstance(image, ImageError):
        raise image
    started = perf_counter_ns()
    pixels = decode_image(image, limits=limits, name="bytes")
    decoded = perf_counter_ns()
    letterbox = preprocessor.write(pixels, slot)
    return letterbox, {"decode": decoded - started, "preprocess": perf_counter_ns() - decoded}


def objects_in(
    outputs: Mapping[str, npt.NDArray[Any]], slot: int, letterbox: Letterbox, options: Mapping[str, Any]
) -> tuple[Detections, int]:
    """The objects of the image in one slot of the engine's outputs, and nanoseconds."""
    started = perf_counter_ns()
    prototypes = outputs.get("prototypes")
    found = postprocess(
        outputs["predictions"][slot],
        letterbox,
        prototypes=None if prototypes is None else prototypes[slot],
        **options,
    )
    return found, perf_counter_ns() - started
