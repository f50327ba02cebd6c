"""How far two answers for the same image are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.postprocess.masks import mask_iou
from visionfast.postprocess.nms import box_iou
from visionfast.results import Detections
from visionfast.types import Certificate, Precision

__all__ = ["TOLERANCES", "combined", "compare_detections", "compare_raw", "is_within", "shortfall"]

# Of a measure whose name begins with min, the least that is allowed; of the others, the most.
TOLERANCES: dict[Precision, dict[str, float]] = {
    "fp32": {"min_iou": 0.99, "max_confidence_difference": 0.01, "unmatched": 0, "max_score_difference": 0.01,
             "max_box_difference_px": 1.0, "min_mask_iou": 0.98},
    "fp16": {"min_iou": 0.97, "max_confidence_difference": 0.02, "unmatched": 0, "max_score_difference": 0.04,
             "min_mask_iou": 0.95},
    "bf16": {"min_iou": 0.90, "max_confidence_difference": 0.05, "unmatched": 0, "max_score_difference": 0.15,
             "min_mask_iou": 0.90},
}  # fmt: skip
# A NaN anywhere must fail, and JSON has no word for it nor for infinity: the largest number stands for both.
_NOT_FINITE = float(np.finfo(np.float32).max)


def compare_detections(expected: Detections, got: Detections, *, conf: float, slack: float) -> dict[str, float]:
    """How far two answers for one image are apart.

    Args:
        expected, got: the answers.
        conf: the threshold that both were made with.
        slack: an unmatched object within this of the threshold is not counted.

    Returns:
        objects, unmatched, and where objects matched also min_iou, max_confidence_difference, min_mask_iou.
    """
    iou = box_iou(expected.xyxy, got.xyxy)  # (N, M)
    iou[expected.class_id[:, None] != got.class_id[None, :]] = 0
    pairs: list[tuple[int, int]] = []
    free = iou.copy()
    while free.size and free.max() >= 0.5:
        i, j = np.unravel_index(int(free.argmax()), free.shape)
        pairs.append((int(i), int(j)))
        free[i, :] = free[:, j] = 0
    left = (
        np.delete(expected.confidence, [i for i, _ in pairs]),
        np.delete(got.confidence, [j for _, j in pairs]),
    )
    unmatched = sum(int((confidence > conf + slack).sum()) for confidence in left)
    measures = {"objects": float(len(expected)), "unmatched": float(unmatched)}
    if pairs:
        i, j = np.array(pairs).T
        measures["min_iou"] = float(iou[i, j].min())
        measures["max_confidence_difference"] = float(np.abs(expected.confidence[i] - got.confidence[j]).max())
        if expected.mask is not None and got.mask is not None:
            measures["min_mask_iou"] = float(mask_iou(expected.mask, got.mask)[i, j].min())
    return measures


def compare_raw(
    expected: dict[str, npt.NDArray[Any]], got: dict[str, npt.NDArray[Any]], num_classes: int
) -> dict[str, float]:
    """Scores of all anchors; boxes, in input pixels, of the 100 with the highest expected score."""
    a, b = expected["predictions"][0].astype(np.float32), got["predictions"][0].astype(np.float32)
    scores = slice(4, 4 + num_classes)
    best = np.argsort(-a[scores].max(0), kind="stable")[:100]
    score = np.abs(a[scores] - b[scores]).max()
    box = np.abs(a[:4, best] - b[:4, best]).max()
    return {
        "max_score_difference": float(np.nan_to_num(score, nan=_NOT_FINITE, posinf=_NOT_FINITE)),
        "max_box_difference_px": float(np.nan_to_num(box, nan=_NOT_FINITE, posinf=_NOT_FINITE)),
    }


def combined(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """The figures of all images as one: the worst of each measure, and the sum of what is counted."""
    total: dict[str, float] = {"images": float(len(measured))}
    for name in dict.fromkeys(name for measures in measured for name in measures):
        values = [measures[name] for measures in measured if name in measures]
        total[name] = min(values) if name.startswith("min") else max(values) if name.startswith("max") else sum(values)
    return total


def shortfall(certificate: Certificate) -> str:
    """The measure that is furthest out of its bounds, in words; empty where all are within."""
    outside = {
        name: (certificate.measures[name], bound)
        for name, bound in certificate.tolerances.items()
        if not is_within(name, certificate.measures[name], bound)
    }
    if not outside:
        return ""

    def excess(name: str) -> float:
        value, bound = outside[name]
        if value >= _NOT_FINITE:
            return math.inf
        return (1 - value) / (1 - bound) if name.startswith("min") else value / max(bound, 0.01)

    name = max(outside, key=excess)
    value, bound = outside[name]
    allowed = f"{'≥' if name.startswith('min') else '≤'} {bound:g}"
    shown = "not finite" if value >= _NOT_FINITE else f"{value:.3g}"
    return f"{name.replace('_', ' ')} {shown}, allowed {allowed}"


def is_within(name: str, value: float, bound: float) -> bool:
    return value >= bound if name.startswith("min") else value <= bound
