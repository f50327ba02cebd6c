"""What the kernels' buffers hold, for those who write and those who read them. NumPy only.

Placement (B, 8) float32 says where each slot's image lies in the network's input:

    left, top, gain_x, gain_y, W, H, resized_w, resized_h

with `gain_x = resized_w / W` and `gain_y = resized_h / H` each rounded once to float32, as
`postprocess.boxes.unletterbox_boxes` has them. A slot without an image is all zeros, and has no objects.

Found (B, 1 + max_det, 8) int32 is the objects of each slot. Row 0 is its header; each row after that one object, by
descending confidence, ties by ascending anchor. Rows beyond the count are undefined.

    header: count, candidates, 0, 0, 0, 0, 0, 0
    object: x1, y1, x2, y2, confidence (the bits of float32), class_id, anchor, 0

`xyxy` are original pixels, clipped to the image. One buffer, so that one copy brings all of it to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.types import Letterbox

__all__ = ["COLUMNS", "Found", "found_shape", "placement", "read_found"]

COLUMNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """One slot's objects, arrays of their own.

    Attributes:
        xyxy: (N, 4) float32, original pixels.
        confidence: (N,) float32.
        class_id: (N,) int64.
        anchor: (N,) int64, column of `predictions`.
    """

    xyxy: npt.NDArray[np.float32]
    confidence: npt.NDArray[np.float32]
    class_id: npt.NDArray[np.int64]
    anchor: npt.NDArray[np.int64]


def found_shape(batch: int, max_det: int) -> tuple[int, int, int]:
    """Of the int32 buffer."""
    return (batch, 1 + max_det, COLUMNS)


def placement(letterboxes: Sequence[Letterbox | None], out: npt.NDArray[np.float32]) -> None:
    """Writes each slot's row of `out` (B, 8) float32; `None`, and slots beyond the sequence, have no image."""
    out[:] = 0
    for row, letterbox in zip(out, letterboxes, strict=False):
        if letterbox is not None:
            (height, width), (resized_h, resized_w) = letterbox.image_hw, letterbox.resized_hw
            gain_x, gain_y = resized_w / width, resized_h / height
            row[:] = letterbox.left, letterbox.top, gain_x, gain_y, width, height, resized_w, resized_h


def read_found(rows: npt.NDArray[np.int32]) -> Found:
    """One slot's (1 + max_det, 8) int32 rows → its objects, copied out of the buffer."""
    objects = rows[1 : 1 + int(rows[0, 0])]
    return Found(
        xyxy=objects[:, :4].copy().view(np.float32),
        confidence=objects[:, 4].copy().view(np.float32),
        class_id=objects[:, 5].astype(np.int64),
        anchor=objects[:, 6].astype(np.int64),
    )
