"""A data set's segmentations, polygons or run lengths, as the compressed run lengths that masks are compared in."""

from __future__ import annotations

from typing import Any

import numpy as np

from visionfast.postprocess.masks import run_lengths

__all__ = ["check_segmentation", "segmentation_rle", "segmentation_size"]

_FARTHEST = 1e5
"""Pixels: beyond that no polygon's corner lies in a picture that is decoded, and drawing its edges costs memory."""

_LONGEST = 2e6
"""Pixels around a polygon: drawing takes pycocotools some 80 bytes for each, and it ends the process without them."""


def check_segmentation(segmentation: Any) -> str:
    """What was expected of a segmentation that is none of COCO's, in words; empty for one that is.

    Polygons are lists of at least three corners, x and y in turn; run lengths an object with `size`, (H, W), and
    `counts`: a list of numbers, or text, compressed.
    """
    if isinstance(segmentation, dict):
        return _check_runs(segmentation)
    if not isinstance(segmentation, list):
        return "polygons or run lengths"
    for polygon in segmentation:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return "polygons of at least three corners, x and y in turn"
        # Every one is looked at: a text or a bool among them would pass as a number in NumPy.
        if not all(type(value) in (int, float) and abs(value) <= _FARTHEST for value in polygon):
            return f"corners in pixels, at most {_FARTHEST:.0f}"
        if _way_around(polygon) > _LONGEST:
            return f"polygons of at most {_LONGEST:.0f} pixels around"
    return ""


def _way_around(polygon: list[float]) -> float:
    """Pixels of the edges, as they are drawn: of each its longer side."""
    x, y = polygon[::2], polygon[1::2]
    edges = zip(x, [*x[1:], x[0]], y, [*y[1:], y[0]], strict=True)
    return sum(max(abs(to_x - from_x), abs(to_y - from_y)) for from_x, to_x, from_y, to_y in edges)


def _check_runs(rle: dict[str, Any]) -> str:
    size, counts = rle.get("size"), rle.get("counts")
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        return "run lengths with their size, [height, width]"
    if isinstance(counts, list):
        if not all(type(count) is int and count >= 0 for count in counts):
            return "run lengths of at least 0"
        total = sum(counts)
    elif isinstance(counts, str) and counts and all("0" <= symbol < "p" for symbol in counts):
        total = _decoded_total(counts)
    else:
        return "run lengths as numbers or as COCO's text"
    return "" if total == size[0] * size[1] else f"run lengths of {size[0] * size[1]} pixels in all"


def _decoded_total(counts: str) -> int:
    """Pixels of compressed run lengths, or -1 where they are none."""
    symbols = np.frombuffer(counts.encode(), np.uint8) - 48
    ends = np.flatnonzero(symbols < 32)
    longest = np.diff(np.concatenate(([-1], ends))).max(initial=0)
    if symbols[-1] >= 32 or longest > 7:  # the last number does not end, or one has more bits than a length can
        return -1
    runs = run_lengths(counts.encode())
    return int(runs.sum()) if runs.min() >= 0 else -1


def segmentation_rle(segmentation: Any, image_hw: tuple[int, int]) -> dict[str, Any]:
    """The object's mask as pycocotools takes it: `{"size": [H, W], "counts": bytes}`, compressed.

    Several polygons are one object in parts; as `pycocotools.coco.COCO.annToRLE` has it.

    Args:
        segmentation: of `check_segmentation`.
        image_hw: the image, pixels; of run lengths the same as their own size.
    """
    import pycocotools.mask as coco_mask

    height, width = image_hw
    if isinstance(segmentation, list):
        parts = coco_mask.frPyObjects([[float(value) for value in polygon] for polygon in segmentation], height, width)
        rle: dict[str, Any] = coco_mask.merge(parts)
        return rle
    counts = segmentation["counts"]
    if isinstance(counts, str):
        return {"size": [height, width], "counts": counts.encode()}
    packed: dict[str, Any] = coco_mask.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    return packed


def segmentation_size(segmentation: Any) -> tuple[int, int] | None:
    """The image's height and width that run lengths are for; `None` for polygons, which have none."""
    if not isinstance(segmentation, dict):
        return None
    height, width = segmentation["size"]
    return int(height), int(width)
