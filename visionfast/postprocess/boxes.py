"""Raw predictions → candidate boxes, and boxes in the network's input → boxes in the original image.

A YOLOv8 engine gives, for each image, `predictions` of shape (4 + C + M, A): for each of A anchors the box
(cx, cy, w, h, already decoded, in input pixels), the C class scores (after the sigmoid) and, for
segmentation, M mask coefficients. The rules are those of ultralytics 8.4 (`utils/nms.py`, `utils/ops.py`),
restated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.types import Letterbox

__all__ = [
    "MAX_CANDIDATES",
    "Candidates",
    "above_confidence",
    "cxcywh_to_xyxy",
    "select_candidates",
    "select_candidates_reference",
    "unletterbox_boxes",
]

MAX_CANDIDATES = 30_000
"""Anchors that NMS looks at in one image at most, the most confident ones; ultralytics' `max_nms`."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """K boxes that NMS has yet to thin out, by descending confidence, ties by ascending anchor.

    Attributes:
        anchor: (K,) int64, column of `predictions`.
        xyxy: (K, 4) float32, corners in input pixels.
        confidence: (K,) float32, the best class score.
        class_id: (K,) int64, the class that has it; of equal ones the lowest.
    """

    anchor: npt.NDArray[np.int64]
    xyxy: npt.NDArray[np.float32]
    confidence: npt.NDArray[np.float32]
    class_id: npt.NDArray[np.int64]


def cxcywh_to_xyxy(cxcywh: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(N, 4) centre and size → (N, 4) corners, both float32; the input is left as it was."""
    centre, half_wh = cxcywh[:, :2], cxcywh[:, 2:] / np.float32(2)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is dropped by who asked
        return np.concatenate((centre - half_wh, centre + half_wh), axis=1)


def unletterbox_boxes(xyxy: npt.NDArray[np.float32], letterbox: Letterbox) -> npt.NDArray[np.float32]:
    """Boxes in input pixels → boxes in original pixels, clipped to the image.

    As ultralytics' `scale_boxes`, float32: each axis has its own gain, resized over original, because
    letterbox rounds the resized sides to whole pixels (on extreme aspects the two gains differ by much).

    Args:
        xyxy: (N, 4) float32, input pixels.
        letterbox: where the image lies in the input.

    Returns:
        (N, 4) float32, 0 ≤ x ≤ W and 0 ≤ y ≤ H.
    """
    height, width = letterbox.image_hw
    gain_y, gain_x = letterbox.resized_hw[0] / height, letterbox.resized_hw[1] / width
    corner = np.array([letterbox.left, letterbox.top, letterbox.left, letterbox.top], np.float32)
    gain = np.array([gain_x, gain_y, gain_x, gain_y], np.float32)
    limit = np.array([width, height, width, height], np.float32)
    original: npt.NDArray[np.float32] = (xyxy - corner) / gain
    np.maximum(original, np.float32(0), out=original)
    np.minimum(original, limit, out=original)
    return original


def above_confidence(predictions: npt.NDArray[np.float32], num_classes: int, conf: float) -> npt.NDArray[np.int64]:
    """The anchors that `select_candidates` can choose: their columns alone, in this order, give it the same boxes.

    Args:
        predictions: (4 + C + M, A) float32; fastest where C-contiguous.
        num_classes: C.
        conf: as for `select_candidates`.

    Returns:
        (K,) ascending.
    """
    best = predictions[4 : 4 + num_classes].max(axis=0)  # (A,): over the outer axis, so whole rows at a time
    return np.flatnonzero(best > np.float32(conf))  # NaN is passed on, and above nothing


def select_candidates_reference(
    predictions: npt.NDArray[np.float32],
    num_classes: int,
    *,
    conf: float,
    classes: Sequence[int] | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Candidates:
    """The definition of `select_candidates`, one anchor at a time."""
    found: list[tuple[int, np.float32, int]] = []
    for anchor in range(predictions.shape[1]):
        scores = predictions[4 : 4 + num_classes, anchor]
        box = cxcywh_to_xyxy(predictions[None, :4, anchor])
        class_id = int(np.argmax(scores))  # NaN counts as the largest, so one NaN score drops the anchor
        confidence = scores[class_id]
        if not (np.isfinite(confidence) and np.isfinite(box).all()):
            continue
        if confidence > np.float32(conf) and (classes is None or class_id in classes):
            found.append((anchor, confidence, class_id))
    found.sort(key=lambda candidate: -candidate[1])  # stable: ties stay in the anchors' order
    found = found[:max_candidates]
    anchors = np.array([anchor for anchor, _, _ in found], np.int64)
    return Candidates(
        anchor=anchors,
        xyxy=cxcywh_to_xyxy(predictions[:4].T[anchors]),
        confidence=np.array([confidence for _, confidence, _ in found], np.float32),
        class_id=np.array([class_id for _, _, class_id in found], np.int64),
    )


def select_candidates(
    predictions: npt.NDArray[np.float32],
    num_classes: int,
    *,
    conf: float,
    classes: Sequence[int] | None = None,
    max_candidates: int = MAX_CANDIDATES,
) -> Candidates:
    """The anchors whose best class is confident enough.

    Each anchor stands for its best class alone (not one box for each class), as in ultralytics' predict. An
    anchor whose confidence or box is NaN or infinite is never chosen, nor one that has a NaN class score.

    Args:
        predictions: (4 + C + M, A) float32; fastest where C-contiguous.
        num_classes: C.
        conf: chosen are those strictly above it, compared in float32.
        classes: chosen are those whose best class is one of these; `None`: any.
        max_candidates: the most confident ones, at most so many.

    Returns:
        K candidates, by descending confidence, ties by ascending anchor; arrays of their own.
    """
    anchor = above_confidence(predictions, num_classes, conf)  # (K,)
    scores = predictions[4 : 4 + num_classes].T[anchor]  # (K, C)
    xyxy = cxcywh_to_xyxy(predictions[:4].T[anchor])  # (K, 4)
    class_id = scores.argmax(axis=1)  # the first of equal ones
    confidence = scores[np.arange(len(anchor)), class_id]
    chosen = np.isfinite(confidence) & np.isfinite(xyxy).all(axis=1)
    if classes is not None:
        chosen &= np.isin(class_id, np.asarray(classes, np.int64))
    order = np.argsort(-confidence, kind="stable")
    order = order[chosen[order]][:max_candidates]
    return Candidates(anchor[order], xyxy[order], confidence[order], class_id[order])
