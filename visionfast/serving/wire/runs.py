"""Run lengths of several masks in one row: `mask` and `mask_ends`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ServerError
from visionfast.postprocess.masks import InstanceMasks, run_lengths
from visionfast.serving.wire.tensors import OURS, pack_rows

__all__ = ["pack_runs", "unpack_runs"]


def pack_runs(counts: Sequence[tuple[bytes, ...]], k: int) -> dict[str, npt.NDArray[Any]]:
    """For B images their masks' COCO run lengths → `mask` (B, m) uint8 and `mask_ends` (B, k) int32."""
    ends = np.zeros((len(counts), k), np.int32)
    for row, some in zip(ends, counts, strict=True):
        row[: len(some)] = np.cumsum([len(one) for one in some])
    return {"mask": pack_rows([b"".join(some) for some in counts]), "mask_ends": ends}


def unpack_runs(joined: npt.NDArray[np.uint8], ends: npt.NDArray[np.int32], image_hw: tuple[int, int]) -> InstanceMasks:
    """One image's rows, as long as it has masks → the masks.

    Raises:
        ServerError: they are not the masks of such an image.
    """
    starts = np.concatenate(([0], ends))[:-1]
    if len(ends) and (np.any(ends <= starts) or ends[-1] > len(joined)):
        raise ServerError(f"mask_ends: expected rising ends within the {len(joined)} bytes of mask; {OURS}")
    counts = tuple(joined[start:end].tobytes() for start, end in zip(starts, ends, strict=True))
    if not all(_covers(one, image_hw[0] * image_hw[1]) for one in counts):
        raise ServerError(f"mask: expected run lengths of an image of {image_hw[1]}×{image_hw[0]} pixels; {OURS}")
    return InstanceMasks(counts, image_hw)


def _covers(counts: bytes, pixels: int) -> bool:
    """Whether these are run lengths that make up so many pixels."""
    symbols = np.frombuffer(counts, np.uint8)
    if symbols.min() < 48 or symbols.max() > 111 or symbols[-1] >= 80:  # its last number goes on
        return False
    lengths = run_lengths(counts)
    if lengths.min() < 0 or lengths.max() > pixels:
        return False
    ends = np.cumsum(lengths)  # one that passed 64 bits would have been negative first
    return bool(ends.min() >= 0 and ends[-1] == pixels)
