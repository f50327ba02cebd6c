"""An embedder's answers in arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ServerError
from visionfast.preprocess.antialias import geometry
from visionfast.serving.wire.faults import pack_problems, unpack_problem
from visionfast.serving.wire.tensors import OURS, check_arrays, pack_stages, stages_of, unpack_stages
from visionfast.sessions.embeddings import Embedded
from visionfast.types import ModelSpec

__all__ = ["pack_vectors", "unpack_vectors"]


def pack_vectors(
    answers: Sequence[Embedded | ImageError], spec: ModelSpec, *, patches: bool
) -> dict[str, npt.NDArray[Any]]:
    """The vectors of B images, as the model gives them; every array owns its memory and none is empty.

    Args:
        answers: with their patches, if these are asked for.
        spec: of the model.
        patches: give the patches' vectors too.
    """
    assert answers, "the server asks for at least one image"
    b = len(answers)
    (d,), grid = (tensor.shape[1:] for tensor in spec.graphs[0].outputs)
    packed: dict[str, npt.NDArray[Any]] = {
        "image_hw": np.zeros((b, 2), np.int32),
        "cls": np.zeros((b, d), np.float32),
        **({"patches": np.zeros((b, *grid), np.float32)} if patches else {}),
        "stage_ns": np.full((b, len(stages_of("embed"))), -1, np.int64),
        "problem": pack_problems([answer if isinstance(answer, ImageError) else None for answer in answers]),
    }
    for i, answer in enumerate(answers):
        if isinstance(answer, ImageError):
            continue
        packed["image_hw"][i] = answer.placed.image_hw
        packed["cls"][i] = answer.cls
        if patches:
            packed["patches"][i] = answer.patches
        packed["stage_ns"][i] = pack_stages(answer.stage_ns, "embed")
    return packed


def unpack_vectors(
    arrays: Mapping[str, npt.NDArray[Any]], spec: ModelSpec, *, patches: bool
) -> list[Embedded | ImageError]:
    """The inverse of `pack_vectors`: the same values to the bit, and errors of the same type and text.

    Where an image lies in the network's input is computed again from its size.

    Raises:
        ServerError: the arrays contradict one another, or what was asked for: they are not this model's.
    """
    cls, dense = spec.graphs[0].outputs
    check_arrays(arrays, "embed", {"cls": cls.shape[1:], "patches": dense.shape[1:]})
    if patches and "patches" not in arrays:
        raise ServerError(f"patches: expected it among the answers, got {', '.join(sorted(arrays))}; {OURS}")
    b = len(arrays["cls"])
    return [unpack_problem(arrays["problem"][i]) or _unpacked(arrays, i, spec, patches) for i in range(b)]


def _unpacked(arrays: Mapping[str, npt.NDArray[Any]], i: int, spec: ModelSpec, patches: bool) -> Embedded:
    height, width = (int(pixels) for pixels in arrays["image_hw"][i])
    if height < 1 or width < 1:
        raise ServerError(f"image_hw: expected at least 1×1 pixels, got {width}×{height}; {OURS}")
    return Embedded(
        cls=arrays["cls"][i].copy(),
        patches=arrays["patches"][i].copy() if patches else None,
        placed=geometry((height, width), spec.preprocess),
        stage_ns=unpack_stages(arrays["stage_ns"][i], "embed"),
    )
