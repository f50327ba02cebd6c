"""A prompt segmenter's answers in arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ServerError
from visionfast.results import Masks
from visionfast.serving.wire.faults import pack_problems, unpack_problem
from visionfast.serving.wire.runs import pack_runs, unpack_runs
from visionfast.serving.wire.tensors import OURS, check_arrays, pack_stages, stages_of, unpack_stages
from visionfast.types import Task

__all__ = ["pack_masks", "unpack_masks"]

_OPTIONAL = ("logits", "stability", "points")
_TASK: Task = "prompt-segment"


def pack_masks(answers: Sequence[Masks | ImageError]) -> dict[str, npt.NDArray[Any]]:
    """The masks on B images, asked for with the same options, as the model gives them; every array owns its memory and
    none is empty. `logits`, `stability` and `points` are there if an answer has them."""
    assert answers, "the server asks for at least one image"
    b = len(answers)
    found = {i: answer for i, answer in enumerate(answers) if isinstance(answer, Masks)}
    k = max([1, *map(len, found.values())])
    packed: dict[str, npt.NDArray[Any]] = {
        "count": np.zeros((b, 1), np.int32),
        "image_hw": np.zeros((b, 2), np.int32),
        "score": np.zeros((b, k), np.float32),
        "prompt": np.zeros((b, k), np.int32),
        "stage_ns": np.full((b, len(stages_of(_TASK))), -1, np.int64),
        "problem": pack_problems([answer if isinstance(answer, ImageError) else None for answer in answers]),
    }
    for name in _OPTIONAL:
        for masks in found.values():
            if (array := getattr(masks, name)) is not None:
                packed[name] = np.zeros((b, k, *array.shape[1:]), np.float32)
    for i, masks in found.items():
        n = len(masks)
        packed["count"][i] = n
        packed["image_hw"][i] = masks.image_hw
        packed["stage_ns"][i] = pack_stages(masks.stage_ns, _TASK)
        for name in ("score", "prompt", *_OPTIONAL):
            if (array := getattr(masks, name)) is not None:
                packed[name][i, :n] = array
    return packed | pack_runs([found[i].mask.counts if i in found else () for i in range(b)], k)


def unpack_masks(arrays: Mapping[str, npt.NDArray[Any]]) -> list[Masks | ImageError]:
    """The inverse of `pack_masks`: the same values to the bit, and errors of the same type and text.

    Raises:
        ServerError: the arrays contradict one another: they are not a visionfast model's.
    """
    score = arrays.get("score")
    k = score.shape[1] if score is not None and score.ndim == 2 else None
    logits = arrays.get("logits")
    sides = logits.shape[2:] if logits is not None and logits.ndim == 4 else (None, None)
    rows = dict.fromkeys(("score", "prompt", "stability", "mask_ends"), (k,))
    check_arrays(arrays, _TASK, {**rows, "logits": (k, *sides), "points": (k, 2)})
    return [unpack_problem(arrays["problem"][i]) or _unpacked(arrays, i) for i in range(len(arrays["count"]))]


def _unpacked(arrays: Mapping[str, npt.NDArray[Any]], i: int) -> Masks:
    n, k = int(arrays["count"][i, 0]), arrays["score"].shape[1]
    height, width = (int(pixels) for pixels in arrays["image_hw"][i])
    if not 0 <= n <= k:
        raise ServerError(f"count: expected 0 to {k}, the masks that were sent, got {n}; {OURS}")
    if height < 1 or width < 1:
        raise ServerError(f"image_hw: expected at least 1×1 pixels, got {width}×{height}; {OURS}")
    # Copies: what the client library gives may be a view of a message, read-only.
    return Masks(
        mask=unpack_runs(arrays["mask"][i], arrays["mask_ends"][i, :n], (height, width)),
        score=arrays["score"][i, :n].copy(),
        prompt=arrays["prompt"][i, :n].astype(np.int64),
        image_hw=(height, width),
        stage_ns=unpack_stages(arrays["stage_ns"][i], _TASK),
        **{name: arrays[name][i, :n].copy() for name in _OPTIONAL if name in arrays},
    )
