"""Small holes and specks of a mask, removed as Segment Anything's automatic generator does it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["remove_small_regions"]


def remove_small_regions(mask: npt.NDArray[np.bool_], min_area: int) -> npt.NDArray[np.bool_] | None:
    """Holes are filled, then what stands apart is dropped, where they have less than `min_area` pixels.

    Regions are 8-connected, holes too. If every part of the mask is smaller than `min_area`, the largest stays. As
    `remove_small_regions` of `segment_anything/utils/amg.py`, first with `holes`, then with `islands`.

    Args:
        mask: (H, W) bool.
        min_area: pixels, at least 1.

    Returns:
        (H, W) bool, or `None` where nothing was to be done.
    """
    window = _window(mask, min_area)
    changed = _without_islands(*_without_holes(mask[window], min_area), min_area)
    if changed is None:
        return None
    repaired = mask.copy()
    repaired[window] = changed
    return repaired


def _window(mask: npt.NDArray[np.bool_], min_area: int) -> tuple[slice, slice]:
    """The rows and columns that say all there is to know: the mask's extent and a margin.

    The margin is so wide that, where it does not reach the image's edge, it has `min_area` pixels by itself on every
    side: what lies open to the rest of the image is then seen to be no small hole, without its pixels being counted.
    """
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return np.s_[:, :]
    (top, bottom), (left, right) = rows[[0, -1]].tolist(), columns[[0, -1]].tolist()
    margin = -(-min_area // (min(bottom - top, right - left) + 1))
    return np.s_[max(0, top - margin) : bottom + margin + 1, max(0, left - margin) : right + margin + 1]


def _without_holes(mask: npt.NDArray[np.bool_], min_area: int) -> tuple[npt.NDArray[np.bool_], bool]:
    """The mask, and whether it is another one."""
    label, area = _regions(~mask)
    hole = area < min_area
    hole[0] = True  # the mask itself
    return (hole[label], True) if hole[1:].any() else (mask, False)


def _without_islands(mask: npt.NDArray[np.bool_], changed: bool, min_area: int) -> npt.NDArray[np.bool_] | None:
    """The mask, or `None` if neither this nor what was done before changed it."""
    label, area = _regions(mask)
    part = area >= min_area
    part[0] = False  # what is not the mask
    if part[1:].all():
        return mask if changed else None
    if not part.any():
        part[1 + int(np.argmax(area[1:]))] = True
    return np.asarray(part[label])


def _regions(inside: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
    """(H, W) int32 label of each pixel, 0 outside; (R + 1,) int32 pixels of each label."""
    import cv2

    plane = inside.astype(np.uint8, order="C")
    _count, label, stats, _centre = cv2.connectedComponentsWithStats(plane, connectivity=8)
    return label, stats[:, cv2.CC_STAT_AREA]
