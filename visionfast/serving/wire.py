"""What a served model takes and gives, in arrays: the one definition, for the client, the stages and config.pbtxt.

`B` requests' images that the server put together, `K` objects of the fullest image, at least one row. Only numbers go
over the wire: NVIDIA's Python stub for this server was built for NumPy 1 and handles byte strings of NumPy 2 wrongly.

An image goes as it is encoded, with zeros behind it up to a multiple of `BUCKET`, so that images of about one size have
one shape, which is what the server puts together. Options of a request (`conf`, `iou`, …) go as its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError
from visionfast.results import Detections
from visionfast.types import Task

__all__ = [
    "BUCKET",
    "WireTensor",
    "inputs_of",
    "outputs_of",
    "pack_answers",
    "pack_image",
    "unpack_answers",
    "unpack_image",
]

BUCKET = 1 << 16
"""Bytes."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One tensor of a served model; `dims` without the batch, -1 where they vary."""

    name: str
    dtype: str
    dims: tuple[int, ...]


def inputs_of(task: Task) -> tuple[WireTensor, ...]:
    """What every served model takes: `image` (B, n) uint8 and `length` (B, 1) int32, the bytes of it that count."""
    raise NotImplementedError


def outputs_of(task: Task) -> tuple[WireTensor, ...]:
    """What a model of this task gives.

    `count` (B, 1) int32; `image_hw` (B, 2) int32; `xyxy` (B, K, 4) float32; `confidence` (B, K) float32; `class_id`
    (B, K) int32; `stage_ns` (B, S) int64 of `STAGES`; `problem` (B, m) uint8, what is wrong with the image as UTF-8 of
    JSON, zeros behind it, all zeros where nothing is. For `segment` also `mask` (B, m) uint8, the COCO run lengths of
    one object after the other, and `mask_ends` (B, K) int32, where each ends.
    """
    raise NotImplementedError


def pack_image(encoded: bytes) -> dict[str, npt.NDArray[Any]]:
    """One image as a request of one: `image` (1, n) and `length` (1, 1)."""
    raise NotImplementedError


def unpack_image(image: npt.NDArray[np.uint8], length: npt.NDArray[np.int32]) -> bytes:
    """(n,) and (1,) → the encoded image.

    Raises:
        ImageError: the length is not within the image.
    """
    raise NotImplementedError


def pack_answers(answers: Sequence[Detections | ImageError], task: Task) -> dict[str, npt.NDArray[Any]]:
    """The answers for B images, as the model gives them; every array owns its memory and none is empty."""
    raise NotImplementedError


def unpack_answers(arrays: Mapping[str, npt.NDArray[Any]], task: Task) -> list[Detections | ImageError]:
    """The inverse of `pack_answers`: the same values to the bit, and errors of the same type and text.

    Raises:
        ServerError: the arrays contradict one another: they are not a visionfast model's.
    """
    raise NotImplementedError
