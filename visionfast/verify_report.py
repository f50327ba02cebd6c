"""What `verify` found: average precisions of the engine and of PyTorch, their difference, and what it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.verify_matches import AREAS, Matches
from visionfast.verify_precision import average_precisions, bootstrap_differences

__all__ = ["Accuracy", "BadImage", "Comparison", "VerifyReport", "compare"]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """COCO's average precision, 0..1; `None` where the data set has no such object.

    Attributes:
        ap: mAP50-95, the mean over ten overlaps and over the classes.
        ap50, ap75: at an overlap of 0.5 and of 0.75.
        ap_small, ap_medium, ap_large: as `ap`, of objects below 32 × 32 pixels, between, and above 96 × 96.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None

    @classmethod
    def of(cls, matches: Matches) -> Accuracy:
        """Of all images."""
        by_area = {area: average_precisions(matches, area=area)[0] for area in AREAS}  # (T, K)
        whole = by_area["all"]
        return cls(
            ap=_mean(whole),
            ap50=_mean(whole[0]),
            ap75=_mean(whole[5]),
            ap_small=_mean(by_area["small"]),
            ap_medium=_mean(by_area["medium"]),
            ap_large=_mean(by_area["large"]),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The engine beside PyTorch, on the same images.

    Attributes:
        engine, reference: their average precisions.
        interval95, interval95_ap50: what the difference of mAP50-95, and of mAP50, is between in 95 % of the samples of
            a paired bootstrap over the images, 0..1; `None` where no sample has an object.
        class_ap: class → mAP50-95 of the engine and of PyTorch, for those that the data set has objects of.
    """

    engine: Accuracy
    reference: Accuracy
    interval95: tuple[float, float] | None
    interval95_ap50: tuple[float, float] | None
    class_ap: Mapping[str, tuple[float, float]] = field(repr=False)

    @property
    def difference(self) -> float | None:
        """mAP50-95 of the engine less that of PyTorch, 0..1; `None` where there is no object."""
        if self.engine.ap is None or self.reference.ap is None:
            return None
        return self.engine.ap - self.reference.ap


@dataclass(frozen=True, slots=True)
class BadImage:
    """An image that was left out: its name in the data set, the kind of its `ImageError`, and what is wrong with it."""

    file: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Accuracy of an engine, of eager PyTorch, and whether they are the same within the tolerance.

    Attributes:
        engine: its folder, as the command line names it.
        model, task, backend, precision, device: what it is.
        weights_sha256, engine_sha256: of the checkpoint, and of the engine's files by name.
        certificate: its status.
        reference: what it was compared with, in words.
        annotations, annotations_sha256: the data set's file.
        images: how many were compared.
        objects: how many were to be found on them, of the evaluated classes, crowds not among them.
        bad_images: those that were left out, on both sides.
        classes: the names of those that were evaluated.
        classes_without_category: of the engine, that the data set does not have; what is found of them does not count.
        categories_without_class: of the data set, that the engine does not have; they are not looked for.
        boxes: the comparison of boxes.
        masks: that of masks; `None` for a detector, and where the data set has none.
        tolerance_points: how far apart the two mAP50-95 may be, in points of 100.
        settings: what both sides found objects with, and the bootstrap's size and seed.
        environment: machine and versions.
        created: UTC, ISO 8601.
        visionfast_version: that measured it.
    """

    engine: str
    model: str
    task: str
    backend: str
    precision: str
    device: str
    weights_sha256: str
    engine_sha256: Mapping[str, str]
    certificate: str
    reference: str
    annotations: str
    annotations_sha256: str
    images: int
    objects: int
    bad_images: tuple[BadImage, ...]
    classes: tuple[str, ...]
    classes_without_category: tuple[str, ...]
    categories_without_class: tuple[str, ...]
    boxes: Comparison
    masks: Comparison | None
    tolerance_points: float
    settings: Mapping[str, float]
    environment: Mapping[str, str]
    created: str
    visionfast_version: str

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """`boxes`, and `masks` where they were compared."""
        return {"boxes": self.boxes} | ({} if self.masks is None else {"masks": self.masks})

    @property
    def passed(self) -> bool:
        """Whether the engine is as accurate as PyTorch within the tolerance, and its certificate did not fail."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it did not pass, a line each."""
        reasons = []
        if self.certificate == "failed":
            reasons.append("the certificate failed: no accuracy is claimed for an engine that disagrees with PyTorch")
        for kind, compared in self.comparisons.items():
            if compared.difference is None:
                reasons.append(f"{kind}: none of the images that could be used has an object to find")
            elif abs(points := 100 * compared.difference) > self.tolerance_points:
                reasons.append(
                    f"{kind}: mAP50-95 differs by {points:+.2f} points, more than {self.tolerance_points:g}"
                    + _by_chance(compared, self.images)
                )
        return tuple(reasons)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Where the difference is within the tolerance and its interval is not: other images might say otherwise."""
        doubts = []
        for kind, compared in self.comparisons.items():
            if compared.difference is None or compared.interval95 is None:
                continue
            low, high = (100 * bound for bound in compared.interval95)
            within = abs(100 * compared.difference) <= self.tolerance_points
            if within and max(-low, high) > self.tolerance_points:
                doubts.append(
                    f"{kind}: the interval, {low:+.2f} to {high:+.2f} points, reaches beyond the tolerance of "
                    f"{self.tolerance_points:g}; more images would tell"
                )
        return tuple(doubts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every field, with the differences and the verdict beside them."""
        content = dataclasses.asdict(self)
        for kind, compared in self.comparisons.items():
            content[kind]["difference"] = compared.difference
        return {"passed": self.passed, "reasons": list(self.reasons), "doubts": list(self.doubts)} | content


def compare(
    engine: Matches, reference: Matches, *, class_names: tuple[str, ...], resamples: int, seed: int
) -> Comparison:
    """The comparison of two answers to the same images.

    Args:
        engine, reference: of the same images, in the same order, and of the same classes.
        class_names: of these classes.
        resamples, seed: of the bootstrap.
    """
    ours, theirs = (average_precisions(matches)[0].mean(axis=0) for matches in (engine, reference))  # (K,)
    differences = bootstrap_differences(engine, reference, resamples=resamples, seed=seed)  # (R, 2)
    present = np.flatnonzero(~np.isnan(ours))
    return Comparison(
        engine=Accuracy.of(engine),
        reference=Accuracy.of(reference),
        interval95=_interval(differences[:, 0]),
        interval95_ap50=_interval(differences[:, 1]),
        class_ap={class_names[index]: (float(ours[index]), float(theirs[index])) for index in present},
    )


def _by_chance(compared: Comparison, images: int) -> str:
    if compared.interval95 is None or not compared.interval95[0] < 0 < compared.interval95[1]:
        return ""
    return f"; its interval includes 0: {images} images are too few to tell that from chance"


def _interval(differences: npt.NDArray[np.float64]) -> tuple[float, float] | None:
    known = differences[~np.isnan(differences)]
    if not len(known):
        return None
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)


def _mean(precisions: npt.NDArray[np.float64]) -> float | None:
    known = precisions[~np.isnan(precisions)]
    return float(known.mean()) if len(known) else None
