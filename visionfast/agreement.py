"""How far two answers for the same image are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.errors import CertificateError
from visionfast.postprocess.masks import mask_iou
from visionfast.postprocess.nms import box_iou
from visionfast.results import Detections
from visionfast.sessions.prompts import Decoded
from visionfast.types import Certificate, Letterbox, Precision

__all__ = [
    "PROMPT_TOLERANCES",
    "TOLERANCES",
    "combined",
    "compare_detections",
    "compare_masks",
    "compare_raw",
    "embedding_cosine",
    "is_within",
    "shortfall",
    "verdict",
]

# Of a measure whose name begins with min, the least that is allowed; of the others, the most.
TOLERANCES: dict[Precision, dict[str, float]] = {
    "fp32": {"min_iou": 0.99, "max_confidence_difference": 0.01, "unmatched": 0, "max_score_difference": 0.01,
             "max_box_difference_px": 1.0, "min_mask_iou": 0.98},
    "fp16": {"min_iou": 0.97, "max_confidence_difference": 0.02, "unmatched": 0, "max_score_difference": 0.04,
             "min_mask_iou": 0.95},
    "bf16": {"min_iou": 0.90, "max_confidence_difference": 0.05, "unmatched": 0, "max_score_difference": 0.15,
             "min_mask_iou": 0.90},
}  # fmt: skip
PROMPT_TOLERANCES: dict[Precision, dict[str, float]] = {
    "fp32": {"min_embedding_cosine": 0.9999, "min_mask_iou": 0.99, "max_predicted_iou_difference": 0.005,
             "max_logit_difference": 0.01},
    "fp16": {"min_embedding_cosine": 0.999, "min_mask_iou": 0.95, "max_predicted_iou_difference": 0.02,
             "max_logit_difference": 0.1},
    "bf16": {"min_embedding_cosine": 0.99, "min_mask_iou": 0.90, "max_predicted_iou_difference": 0.05,
             "max_logit_difference": 0.3},
}  # fmt: skip
TINY = 0.001
"""Share of the picture: where two masks together cover less, one pixel more or less decides their IoU, and the logits'
difference speaks for them."""

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
    return {"max_score_difference": _finite(score), "max_box_difference_px": _finite(box)}


def embedding_cosine(
    expected: Mapping[str, npt.NDArray[np.float32]], got: Mapping[str, npt.NDArray[np.float32]]
) -> dict[str, float]:
    """The least cosine among the encoder's outputs, each as one vector."""
    cosines = []
    for name, a in expected.items():
        x, y = a.ravel().astype(np.float64), got[name].ravel().astype(np.float64)
        cosines.append(float(np.nan_to_num(x @ y / math.sqrt((x @ x) * (y @ y)), nan=-1.0)))
    return {"min_embedding_cosine": min(cosines)}


def compare_masks(pairs: Sequence[tuple[Decoded, Decoded]], placed: Letterbox) -> dict[str, float]:
    """How far the expected and the given masks of some prompts on one image are apart, all candidates of them.

    Returns:
        masks, tiny_masks (compared by their logits alone, see `TINY`), max_predicted_iou_difference,
        max_logit_difference (over the root mean square of a prompt's expected logits), and where there is a mask that
        is not tiny, min_mask_iou.
    """
    ious: list[float] = []
    logits, scores, tiny = [], [], 0
    tiny_px = TINY * placed.image_hw[0] * placed.image_hw[1]
    for expected, got in pairs:
        every = np.arange(expected.scores.size)
        a, b = expected.logits(every), got.logits(every)
        logits.append(np.abs(a - b).max() / np.sqrt(np.mean(np.square(a))))
        scores.append(np.abs(expected.scores - got.scores).max())
        here, there = expected.masks(every, placed), got.masks(every, placed)
        for i in range(len(every)):
            if max(here[[i]].area()[0], there[[i]].area()[0]) < tiny_px:
                tiny += 1
            else:
                ious.append(float(mask_iou(here[[i]], there[[i]])[0, 0]))
    measures = {
        "masks": float(tiny + len(ious)),
        "tiny_masks": float(tiny),
        "max_predicted_iou_difference": _finite(max(scores)),
        "max_logit_difference": _finite(max(logits)),
    }
    return measures | ({"min_mask_iou": min(ious)} if ious else {})


def _finite(value: Any) -> float:
    return float(np.nan_to_num(value, nan=_NOT_FINITE, posinf=_NOT_FINITE))


def verdict(
    measured: Sequence[dict[str, float]],
    entries: Sequence[Mapping[str, Any]],
    *,
    tolerances: Mapping[str, float],
    reference: str,
) -> Certificate:
    """The certificate over all images.

    Args:
        measured: of each image that could be used.
        entries: of each image, its name, sha256 and measures, or its error.
        tolerances: those that a measure was taken for count.
        reference: what was compared with, in words.

    Raises:
        CertificateError: no image could be used.
    """
    if not measured:
        raise CertificateError(f"none of the {len(entries)} images can be decoded; give real ones with --images")
    total = combined(measured)
    bounds = {name: bound for name, bound in tolerances.items() if name in total}
    return Certificate(
        status="passed" if all(is_within(name, total[name], bound) for name, bound in bounds.items()) else "failed",
        reference=reference,
        tolerances=bounds,
        measures=total,
        images=tuple(entries),
        environment=machine.environment(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


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
