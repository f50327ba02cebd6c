"""Every tensor of a served model, by its task: what the client, the stages and config.pbtxt agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ServerError
from visionfast.types import Task

__all__ = [
    "OPTIONS",
    "OURS",
    "STAGES",
    "WireTensor",
    "check_arrays",
    "inputs_of",
    "options_of",
    "outputs_of",
    "pack_rows",
    "pack_stages",
    "stages_of",
    "unpack_stages",
]

STAGES = ("decode", "preprocess", "engine", "postprocess")
"""Of a detector; columns of its `stage_ns`."""

OPTIONS = ("conf", "iou", "max_det", "classes", "class_agnostic")
"""Of a detector's request; what each means is said at `pipeline.Detector`."""

_STAGES: Mapping[Task, tuple[str, ...]] = {
    "detect": STAGES,
    "segment": STAGES,
    "embed": ("decode", "preprocess", "engine"),
    "prompt-segment": ("hash", "decode", "preprocess", "encoder", "decoder", "postprocess"),
}

_OPTIONS: Mapping[Task, tuple[str, ...]] = {
    "detect": OPTIONS,
    "segment": OPTIONS,
    "embed": ("normalise", "patches"),
    "prompt-segment": ("points", "boxes", "mask_input_shape", "multimask", "logits", "everything", "image_key"),
}

_DATATYPES = {"float16": "FP16", "float32": "FP32"}

OURS = "is it a model that `visionfast deploy` wrote, of this release?"
"""The end of what is said of arrays that contradict one another."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One tensor of a served model.

    Attributes:
        name: as in config.pbtxt.
        dtype: NumPy's name.
        dims: without the batch, -1 where they vary.
        optional: of an answer: there only where the request's options ask for it.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False

    @property
    def datatype(self) -> str:
        """The server's name for the dtype: `FP32`."""
        return _DATATYPES.get(self.dtype, self.dtype.upper())


def stages_of(task: Task) -> tuple[str, ...]:
    """Columns of `stage_ns`; -1 where a stage was not reached."""
    return _STAGES[task]


def options_of(task: Task) -> tuple[str, ...]:
    """Of a request.

    A detector's: `OPTIONS`. `embed`: `normalise`, whether every vector is scaled to a length of 1, and `patches`,
    whether the patches' vectors are given too. `prompt-segment`: `wire.prompts`.
    """
    return _OPTIONS[task]


def inputs_of(task: Task) -> tuple[WireTensor, ...]:
    """What a served model takes.

    `image` (B, n) uint8; `length` (B, 1) int32, the bytes of it that count; `options` (B, m) uint8, JSON of
    `options_of`, zeros behind it, all zeros for none; of one request, all rows are the same. For `prompt-segment` also
    `mask_input` (B, n) float32, the logits of prompts that go on from a mask, and a single zero for none.
    """
    masks = (WireTensor("mask_input", "float32", (-1,)),)
    return (
        WireTensor("image", "uint8", (-1,)),
        WireTensor("length", "int32", (1,)),
        WireTensor("options", "uint8", (-1,)),
        *(masks if task == "prompt-segment" else ()),
    )


def outputs_of(task: Task) -> tuple[WireTensor, ...]:
    """What a model of this task gives.

    All tasks: `image_hw` (B, 2) int32; `stage_ns` (B, S) int64 of `stages_of`; `problem` (B, m) uint8, what is wrong
    with the image as UTF-8 of JSON, zeros behind it, all zeros where nothing is.

    `detect` and `segment`: `count` (B, 1) int32; `xyxy` (B, K, 4) float32; `confidence` (B, K) float32; `class_id`
    (B, K) int32. For `segment` also `mask` (B, m) uint8, the COCO run lengths of one object after the other, and
    `mask_ends` (B, K) int32, where each ends.

    `embed`: `cls` (B, D) float32; with the option `patches` also `patches` (B, h, w, D) float32.

    `prompt-segment`: `count`, `mask` and `mask_ends` as above, of masks; `score` (B, K) float32; `prompt` (B, K) int32;
    with the option `logits` also `logits` (B, K, 256, 256) float32; with `everything` also `stability` (B, K) float32
    and `points` (B, K, 2) float32.
    """
    count, image_hw = WireTensor("count", "int32", (1,)), WireTensor("image_hw", "int32", (2,))
    masks = (WireTensor("mask", "uint8", (-1,)), WireTensor("mask_ends", "int32", (-1,)))
    last = (WireTensor("stage_ns", "int64", (len(_STAGES[task]),)), WireTensor("problem", "uint8", (-1,)))
    if task == "embed":
        cls, patches = WireTensor("cls", "float32", (-1,)), WireTensor("patches", "float32", (-1, -1, -1), True)
        return (image_hw, cls, patches, *last)
    if task == "prompt-segment":
        return (
            count,
            image_hw,
            WireTensor("score", "float32", (-1,)),
            WireTensor("prompt", "int32", (-1,)),
            WireTensor("logits", "float32", (-1, -1, -1), True),
            WireTensor("stability", "float32", (-1,), True),
            WireTensor("points", "float32", (-1, 2), True),
            *last,
            *masks,
        )
    return (
        count,
        image_hw,
        WireTensor("xyxy", "float32", (-1, 4)),
        WireTensor("confidence", "float32", (-1,)),
        WireTensor("class_id", "int32", (-1,)),
        *last,
        *(masks if task == "segment" else ()),
    )


def check_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], task: Task, dims: Mapping[str, tuple[int | None, ...]]
) -> None:
    """Names, dtypes and shapes of an answer's arrays, one B for all.

    Args:
        arrays: by name.
        task: the model's.
        dims: of those tensors whose varying dims are given by others; `None` is one that is not to be had.

    Raises:
        ServerError: one is missing, or is of another dtype or shape.
    """
    b = None
    for tensor in outputs_of(task):
        if (array := arrays.get(tensor.name)) is None:
            if tensor.optional:
                continue
            raise ServerError(f"{tensor.name}: expected it among the answers, got {', '.join(sorted(arrays))}; {OURS}")
        b = len(array) if b is None and array.ndim else b
        free = array.shape[1:] if array.ndim == 1 + len(tensor.dims) else (None,) * len(tensor.dims)
        known = dims.get(tensor.name, tuple(f if d == -1 else d for d, f in zip(tensor.dims, free, strict=True)))
        if array.dtype.name != tensor.dtype or array.shape != (b, *known):
            shown = f"({', '.join('…' if size is None else str(size) for size in (b, *known))})"
            raise ServerError(
                f"{tensor.name}: expected {shown} {tensor.dtype}, got {array.shape} {array.dtype.name}; {OURS}"
            )


def pack_rows(rows: list[bytes], bucket: int = 1) -> npt.NDArray[np.uint8]:
    """(B, m) uint8, m the least multiple of `bucket`, but 0; zeros behind each."""
    size = max(1, *(-(-len(row) // bucket) for row in rows), 1) * bucket
    packed = np.zeros((len(rows), size), np.uint8)
    for row, content in zip(packed, rows, strict=True):
        row[: len(content)] = np.frombuffer(content, np.uint8)
    return packed


def pack_stages(stage_ns: Mapping[str, int], task: Task) -> list[int]:
    """One image's row of `stage_ns`."""
    return [stage_ns.get(stage, -1) for stage in _STAGES[task]]


def unpack_stages(row: npt.NDArray[np.int64], task: Task) -> dict[str, int]:
    """The inverse of `pack_stages`."""
    return {stage: int(ns) for stage, ns in zip(_STAGES[task], row, strict=True) if ns >= 0}
