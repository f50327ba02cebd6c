"""Average precision as COCO defines it, from matches; of many weighted samples of the images at once.

What `pycocotools.cocoeval.COCOeval.accumulate` computes: for each class and overlap, objects that were found by
descending score; precision, made monotonic from the right, read off at 101 recalls; their mean. An image may count
several times or not at all, as in a bootstrap sample (Efron, "Bootstrap methods: another look at the jackknife", 1979);
what would be matched and sorted again for every sample is matched and sorted once for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from visionfast.verify_matches import AREAS, IOUS, Matches

__all__ = ["average_precisions", "bootstrap_differences"]

_RECALLS = np.linspace(0.0, 1.0, 101)
_CELLS = 1 << 23
"""Numbers at a time: 32 MB of the largest array."""


def average_precisions(
    matches: Matches, *, area: str = "all", weights: npt.NDArray[np.int32] | None = None
) -> npt.NDArray[np.float64]:
    """Average precision of each class at each overlap.

    Args:
        matches: what was found.
        area: a key of `AREAS`.
        weights: (R, I) int32, how often each image counts in each of R samples; default: one sample, each once.

    Returns:
        (R, T, K) float64, 0..1, for T overlaps of `IOUS` and K classes; NaN where a sample has no object of a class.
    """
    if weights is None:
        weights = np.ones((1, matches.images), np.int32)
    column = list(AREAS).index(area)
    found, there = matches.found, matches.there
    precisions = np.full((len(weights), len(IOUS), matches.classes), np.nan)
    for index in range(matches.classes):
        of_class = there[there["class_index"] == index]
        objects = weights[:, of_class["image"]] @ of_class["count"][:, column]  # (R,)
        if not objects.any():
            continue
        ranked = found[found["class_index"] == index]
        ranked = ranked[np.argsort(-ranked["score"], kind="stable")]
        precisions[:, :, index] = _of_class(
            weights[:, ranked["image"]], ranked["matched"][:, column], ranked["ignored"][:, column], objects
        )
        precisions[objects == 0, :, index] = np.nan
    return precisions


def _of_class(
    counts: npt.NDArray[np.int32],
    matched: npt.NDArray[np.uint16],
    ignored: npt.NDArray[np.uint16],
    objects: npt.NDArray[np.int32],
) -> npt.NDArray[np.float64]:
    """(R, T) from one class's N finds by descending score: how often each counts (R, N), its bits, and (R,) objects.

    Only where an object is found does recall rise, so precision is needed there alone.
    """
    precisions = np.zeros((len(counts), len(IOUS)))
    passed = np.cumsum(counts, axis=1, dtype=np.int32)  # (R, N) finds down to each, itself among them
    for t in range(len(IOUS)):
        skip = np.flatnonzero(ignored >> t & 1)
        hit = np.flatnonzero((matched & ~ignored) >> t & 1)  # (H,)
        if not len(hit):
            continue
        finds = passed[:, hit]
        if len(skip):
            skipped = np.cumsum(counts[:, skip], axis=1, dtype=np.int32)
            skipped = np.concatenate([np.zeros((len(counts), 1), np.int32), skipped], axis=1)
            finds = finds - skipped[:, np.searchsorted(skip, hit)]
        hits = np.cumsum(counts[:, hit], axis=1, dtype=np.int32)  # (R, H)
        precision = hits / np.maximum(finds, 1)
        envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        recall = hits / np.maximum(objects, 1)[:, None]
        reached = np.searchsorted(_RECALLS, recall, side="right")  # recalls that are read off here or before
        precisions[:, t] = (np.diff(reached, axis=1, prepend=0) * envelope).sum(axis=1) / len(_RECALLS)
    return precisions


def bootstrap_differences(first: Matches, second: Matches, *, resamples: int, seed: int) -> npt.NDArray[np.float64]:
    """How the difference of two answers to the same images varies with the images: a paired bootstrap.

    Each sample has as many images as there are, drawn with replacement, and both answers are judged on the same ones:
    what makes an image hard for both cancels out.

    Args:
        first, second: of the same images, in the same order.
        resamples: how many samples, R.
        seed: of the draw.

    Returns:
        (R, 2) float64, first less second: mAP50-95 and mAP50; NaN where a sample has no object at all.
    """
    assert first.images == second.images
    samples = _samples(first.images, resamples, seed, _largest(first, second))
    return np.concatenate([_means(first, weights) - _means(second, weights) for weights in samples])


def _samples(images: int, resamples: int, seed: int, largest: int) -> Iterator[npt.NDArray[np.int32]]:
    """Weights (r, I) of some samples at a time, so many that no array becomes large."""
    generator = np.random.default_rng(seed)
    at_once = max(1, _CELLS // max(images, largest, 1))
    for start in range(0, resamples, at_once):
        drawn = generator.multinomial(images, [1 / images] * images, size=min(at_once, resamples - start))
        yield drawn.astype(np.int32)


def _largest(*answers: Matches) -> int:
    """Finds of the class with the most."""
    return max(int(np.bincount(one.found["class_index"], minlength=1).max()) for one in answers)


def _means(matches: Matches, weights: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """(R, 2): mAP50-95 and mAP50 over the classes that a sample has objects of."""
    precisions = average_precisions(matches, weights=weights)  # (R, T, K)
    present = ~np.isnan(precisions[:, 0])  # (R, K)
    classes = present.sum(axis=1)  # (R,)
    sums = np.where(present[:, None], precisions, 0).sum(axis=2)  # (R, T)
    with np.errstate(invalid="ignore"):
        means: npt.NDArray[np.float64] = np.stack([sums.mean(axis=1), sums[:, 0]], axis=1) / classes[:, None]
    return means
