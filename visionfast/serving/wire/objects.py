"""A detector's answers in arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ServerError
from visionfast.results import Detections
from visionfast.serving.wire.faults import pack_problems, unpack_problem
from visionfast.serving.wire.runs import pack_runs, unpack_runs
from visionfast.serving.wire.tensors import OURS, STAGES, check_arrays, pack_stages, unpack_stages
from visionfast.types import Task

__all__ = ["pack_answers", "unpack_answers"]


def pack_answers(answers: Sequence[Detections | ImageError], task: Task) -> dict[str, npt.NDArray[Any]]:
    """The answers for B images, as the model gives them; every array owns its memory and none is empty."""
    assert answers, "the server asks for at least one image"
    b = len(answers)
    k = max(1, *(len(answer) if isinstance(answer, Detections) else 0 for answer in answers), 1)
    packed: dict[str, npt.NDArray[Any]] = {
        "count": np.zeros((b, 1), np.int32),
        "image_hw": np.zeros((b, 2), np.int32),
        "xyxy": np.zeros((b, k, 4), np.float32),
        "confidence": np.zeros((b, k), np.float32),
        "class_id": np.zeros((b, k), np.int32),
        "stage_ns": np.full((b, len(STAGES)), -1, np.int64),
        "problem": pack_problems([answer if isinstance(answer, ImageError) else None for answer in answers]),
    }
    for i, answer in enumerate(answers):
        if isinstance(answer, ImageError):
            continue
        n = len(answer)
        packed["count"][i] = n
        packed["image_hw"][i] = answer.image_hw
        packed["xyxy"][i, :n] = answer.xyxy
        packed["confidence"][i, :n] = answer.confidence
        packed["class_id"][i, :n] = answer.class_id
        packed["stage_ns"][i] = pack_stages(answer.stage_ns, task)
    if task == "segment":
        packed |= pack_runs([_counts(answer) for answer in answers], k)
    return packed


def _counts(answer: Detections | ImageError) -> tuple[bytes, ...]:
    if isinstance(answer, ImageError):
        return ()
    assert answer.mask is not None, "a segmenter's objects have masks"
    return answer.mask.counts


def unpack_answers(arrays: Mapping[str, npt.NDArray[Any]], task: Task) -> list[Detections | ImageError]:
    """The inverse of `pack_answers`: the same values to the bit, and errors of the same type and text.

    Raises:
        ServerError: the arrays contradict one another: they are not a visionfast model's.
    """
    xyxy = arrays.get("xyxy")
    k = xyxy.shape[1] if xyxy is not None and xyxy.ndim == 3 else None
    check_arrays(arrays, task, {"xyxy": (k, 4), "confidence": (k,), "class_id": (k,), "mask_ends": (k,)})
    return [
        unpack_problem(arrays["problem"][i]) or _unpack_objects(arrays, i, task) for i in range(len(arrays["count"]))
    ]


def _unpack_objects(arrays: Mapping[str, npt.NDArray[Any]], i: int, task: Task) -> Detections:
    n, k = int(arrays["count"][i, 0]), arrays["xyxy"].shape[1]
    height, width = (int(pixels) for pixels in arrays["image_hw"][i])
    if not 0 <= n <= k:
        raise ServerError(f"count: expected 0 to {k}, the objects that were sent, got {n}; {OURS}")
    if height < 1 or width < 1:
        raise ServerError(f"image_hw: expected at least 1×1 pixels, got {width}×{height}; {OURS}")
    # Copies: what the client library gives may be a view of a message, read-only.
    return Detections(
        xyxy=arrays["xyxy"][i, :n].copy(),
        confidence=arrays["confidence"][i, :n].copy(),
        class_id=arrays["class_id"][i, :n].astype(np.int64),
        image_hw=(height, width),
        mask=unpack_runs(arrays["mask"][i], arrays["mask_ends"][i, :n], (height, width)) if task == "segment" else None,
        stage_ns=unpack_stages(arrays["stage_ns"][i], task),
    )
