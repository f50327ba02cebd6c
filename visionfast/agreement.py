"""How far two answers for the same image are apart, and how far they may be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.errors import CertificateError
from visionfast.postprocess.masks import mask_iou
from visionfast.postprocess.nms import box_iou
from visionfast.results import Detections
from visionfast.sessions.embeddings import Embedded
from visionfast.sessions.prompts import Decoded
from visionfast.types import Certificate, Letterbox, Precision

__all__ = [
    "EMBED_TOLERANCES",
    "PROMPT_TOLERANCES",
    "TOLERANCES",
    "combined",
    "compare_detections",
    "compare_embeddings",
    "compare_masks",
    "compare_neighbours",
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
# Measured on seeded ViT-S of both generations, on two photographs and their parts, the worst patch's cosine short of 1
# and the worst similarity's difference: FP32 (OpenVINO) 5e-13 and 1.5e-7, FP16 (emulated, with its islands) 1.1e-6 and
# 1.5e-4, BF16 (OpenVINO, AMX) 1.2e-4 and 1.5e-3. Trained weights have outliers that seeded ones lack: hence the room.
EMBED_TOLERANCES: dict[Precision, dict[str, float]] = {
    "fp32": {"min_cls_cosine": 0.9999, "min_patch_cosine": 0.9999, "max_norm_difference": 0.0001,
             "max_similarity_difference": 0.0001, "moved_neighbours": 0},
    "fp16": {"min_cls_cosine": 0.999, "min_patch_cosine": 0.999, "max_norm_difference": 0.01,
             "max_similarity_difference": 0.005, "moved_neighbours": 0},
    "bf16": {"min_cls_cosine": 0.99, "min_patch_cosine": 0.99, "max_norm_difference": 0.05,
             "max_similarity_difference": 0.02, "moved_neighbours": 0},
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


def compare_embeddings(expected: Embedded, got: Embedded) -> dict[str, float]:
    """How far two answers for one image are apart: in direction, which is what vectors are compared by, and in length.

    Returns:
        min_cls_cosine and mean_cls_cosine, which are one figure of one image; min_patch_cosine and mean_patch_cosine
        over its patches; max_norm_difference: of the lengths of the class token and of every patch, over the expected
        one.
    """
    assert expected.patches is not None
    assert got.patches is not None
    measures: dict[str, float] = {}
    norms = []
    for name, a, b in (("cls", expected.cls, got.cls), ("patch", expected.patches, got.patches)):
        cosines = _cosines(a, b)
        measures |= {f"min_{name}_cosine": float(cosines.min()), f"mean_{name}_cosine": float(cosines.mean())}
        norms.append(_norm_difference(a, b).max())
    return measures | {"max_norm_difference": _finite(max(norms))}


def _cosines(expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(…, D) and (…, D) → (…): 1 where both are zero, -1 where a value is not finite."""
    # In float64: float32's squares overflow from 1.8e19.
    a, b = expected.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        products = np.einsum("...d,...d->...", a, b)
        lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        found = np.where(a.any(-1) | b.any(-1), products / lengths, 1.0)
    cosines: npt.NDArray[np.float64] = np.nan_to_num(found, nan=-1.0)
    return cosines


def _norm_difference(expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(…, D) and (…, D) → (…): the difference of the lengths over the expected one."""
    a, b = (np.linalg.norm(vectors.astype(np.float64), axis=-1) for vectors in (expected, got))
    with np.errstate(invalid="ignore", divide="ignore"):
        found: npt.NDArray[np.float64] = np.where(a == b, 0.0, np.abs(a - b) / a)
    return found


def compare_neighbours(expected: npt.NDArray[Any], got: npt.NDArray[Any], *, slack: float) -> list[dict[str, float]]:
    """Whether the nearest neighbours of each of N images are the same, in the same order, by their vectors' cosine.

    Args:
        expected, got: (N, D), the vectors of the N images.
        slack: neighbours whose expected similarities are no further apart than this may change places.

    Returns:
        For each image max_similarity_difference: of its similarities to the others; and moved_neighbours: how many
        of the others stand before one that should stand before them. Nothing for an image alone.
    """
    a, b = (_unit(vectors) for vectors in (expected, got))
    if len(a) < 2:
        return [{} for _ in a]
    measures = []
    for i in range(len(a)):  # a row at a time: N × N similarities of a large folder are gigabytes
        row, other = (np.delete(vectors @ vectors[i], i) for vectors in (a, b))
        measures.append(
            {
                "max_similarity_difference": _finite(np.abs(row - other).max()),
                "moved_neighbours": float(_moved(row, other, slack)),
            }
        )
    return measures


def _moved(expected: npt.NDArray[np.float64], got: npt.NDArray[np.float64], slack: float) -> int:
    """Of the others by descending similarity `got`: how many have one behind them that is expected before them."""
    order = np.argsort(-got, kind="stable")  # what is not a number comes last
    in_order = expected[order]
    nearest_behind = np.maximum.accumulate(in_order[::-1])[::-1]  # (N - 1,), each with itself
    return int((nearest_behind - in_order > slack).sum())


def _unit(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled: npt.NDArray[np.float64] = wide / np.linalg.norm(wide, axis=-1, keepdims=True)
    return scaled


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
    """The figures of all images as one: the worst of each measure, the mean of means, the sum of what is counted."""
    total: dict[str, float] = {"images": float(len(measured))}
    for name in dict.fromkeys(name for measures in measured for name in measures):
        values = [measures[name] for measures in measured if name in measures]
        total[name] = _combining(name)(values)
    return total


def _combining(name: str) -> Callable[[list[float]], float]:
    known: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max, "mean": statistics.fmean}
    return known.get(name.partition("_")[0], sum)


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
    digits = 6 if name.startswith("min") else 3  # a cosine that is too small is still near 1
    shown = "not finite" if value >= _NOT_FINITE else f"{value:.{digits}g}"
    return f"{name.replace('_', ' ')} {shown}, allowed {allowed}"


def is_within(name: str, value: float, bound: float) -> bool:
    return value >= bound if name.startswith("min") else value <= bound
