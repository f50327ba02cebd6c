"""What was found in a data set's images, image by image, held against what is there: COCO's matching, kept as arrays.

The matching is `pycocotools.cocoeval`'s own, the evaluation that COCO's figures are published with: overlap, crowds,
objects that count in no range of areas, the hundred most confident of a class. It is asked for one image at a time, so
that masks live no longer than their image; what stays of an object that was found are 28 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from visionfast.results import Detections
from visionfast.verify_dataset import LabelledObject
from visionfast.verify_segments import segmentation_rle

__all__ = ["AREAS", "IOUS", "Kind", "Matcher", "Matches"]

Kind = Literal["boxes", "masks"]

IOUS = np.linspace(0.5, 0.95, 10)
"""An object is found where the overlap is at least this."""

AREAS: Mapping[str, tuple[float, float]] = {
    "all": (0, 1e5**2),
    "small": (0, 32**2),
    "medium": (32**2, 96**2),
    "large": (96**2, 1e5**2),
}
"""Ranges of an object's area, pixels, both ends included."""

_MAX_DET = 100  # of a class in an image

_FOUND = np.dtype(
    [
        ("image", np.int32),
        ("class_index", np.int32),
        ("score", np.float32),
        ("matched", np.uint16, len(AREAS)),
        ("ignored", np.uint16, len(AREAS)),
    ]
)
_THERE = np.dtype([("image", np.int32), ("class_index", np.int32), ("count", np.int32, len(AREAS))])


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Everything that was found, and how many objects there are.

    Attributes:
        found: (D,) one for each object that was found, image by image, within an image by class, within a class by
            descending score. `image` counts from 0, `class_index` is the position among the evaluated classes;
            `matched` and `ignored` have for each range of `AREAS` one bit for each of `IOUS`, the lowest first: it is
            an object that is there; it counts neither way.
        there: (G,) one for each image and class with objects: how many of them count, for each range of `AREAS`.
        images: how many there were, those without any object among them.
        classes: how many are evaluated.
    """

    found: npt.NDArray[Any]
    there: npt.NDArray[Any]
    images: int
    classes: int

    @property
    def objects(self) -> int:
        """That are there and count, of whatever area."""
        return int(self.there["count"][:, list(AREAS).index("all")].sum())


class Matcher:
    """Takes one image after another, by ascending id as COCO's evaluation does.

    Args:
        kind: what is compared, `boxes` or `masks`.
        classes: class id of the engine → the data set's category id, for every class that is evaluated.
    """

    def __init__(self, kind: Kind, classes: Mapping[int, int]) -> None:
        from pycocotools.cocoeval import COCOeval

        self._kind = kind
        self._class_ids = tuple(classes)
        self._categories = {category: index for index, category in enumerate(classes.values())}
        self._coco = COCOeval(iouType="bbox" if kind == "boxes" else "segm")
        self._coco.params.iouThrs = IOUS
        self._coco.params.maxDets = [_MAX_DET]
        self._images = 0
        self._found: list[npt.NDArray[Any]] = []
        self._there: list[npt.NDArray[Any]] = []

    def add(self, there: Sequence[LabelledObject], found: Detections) -> None:
        """The next image: what is on it, and what was found, in its pixels. Other classes are left out.

        A box with a corner that is no number overlaps nothing.
        """
        labelled = self._labelled(there, found.image_hw)
        for index, class_id in enumerate(self._class_ids):
            chosen = np.flatnonzero(found.class_id == class_id)
            # COCO's order; where scores are equal, that in which they were found
            chosen = chosen[np.argsort(-found.confidence[chosen], kind="stable")][:_MAX_DET]
            objects = labelled.get(index, [])
            if len(chosen) or objects:
                self._match(index, objects, self._as_coco(found, chosen))
        self._images += 1

    def matches(self) -> Matches:
        """Of all images so far."""
        return Matches(
            found=np.concatenate([np.zeros(0, _FOUND), *self._found]),
            there=np.concatenate([np.zeros(0, _THERE), *self._there]),
            images=self._images,
            classes=len(self._class_ids),
        )

    def _labelled(self, there: Sequence[LabelledObject], image_hw: tuple[int, int]) -> dict[int, list[dict[str, Any]]]:
        """Position of a class → its objects, as pycocotools takes them."""
        labelled: dict[int, list[dict[str, Any]]] = {}
        for thing in there:
            index = self._categories.get(thing.category_id)
            if index is None:
                continue
            of_class = labelled.setdefault(index, [])
            shape: dict[str, Any] = (
                {"bbox": list(thing.xywh)}
                if self._kind == "boxes"
                else {"segmentation": segmentation_rle(thing.segmentation, image_hw)}
            )
            # Numbers of our own: pycocotools takes an object for not found that is number 0.
            of_class.append(
                {"id": len(of_class) + 1, "area": thing.area, "iscrowd": thing.crowd, "ignore": thing.crowd} | shape
            )
        return labelled

    def _as_coco(self, found: Detections, chosen: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
        scores = found.confidence[chosen].tolist()
        if self._kind == "masks":
            assert found.mask is not None  # of a segmenter
            mask = found.mask[chosen]
            areas: list[float] = mask.area().tolist()
            shapes = [{"segmentation": rle} for rle in mask.rle()]
        else:
            xyxy = found.xyxy[chosen].astype(np.float64)
            xyxy[~np.isfinite(xyxy).all(axis=1)] = 0  # an overlap that is no number would pass as a match
            xywh = np.concatenate([xyxy[:, :2], xyxy[:, 2:] - xyxy[:, :2]], axis=1)
            areas = (xywh[:, 2] * xywh[:, 3]).tolist()
            shapes = [{"bbox": box} for box in xywh.tolist()]
        return [
            {"id": number, "score": score, "area": area} | shape
            for number, (score, area, shape) in enumerate(zip(scores, areas, shapes, strict=True), 1)
        ]

    def _match(self, index: int, objects: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
        """One class of one image. pycocotools' `evaluate` fills these two from whole data sets, and prints."""
        coco, key = self._coco, (self._images, index)
        coco._gts = {key: objects}
        coco._dts = {key: found}
        coco.ious = {key: coco.computeIoU(*key)}
        rows = np.zeros(len(found), _FOUND)
        rows["image"], rows["class_index"] = key
        rows["score"] = [one["score"] for one in found]
        there = np.zeros(1, _THERE)
        there["image"], there["class_index"] = key
        for area, limits in enumerate(AREAS.values()):
            answer = coco.evaluateImg(*key, limits, _MAX_DET)
            rows["matched"][:, area] = _bits(answer["dtMatches"] > 0)
            rows["ignored"][:, area] = _bits(answer["dtIgnore"])
            there["count"][0, area] = len(objects) - np.count_nonzero(answer["gtIgnore"])
        self._found.append(rows)
        if objects:
            self._there.append(there)


def _bits(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint16]:
    """(T, D) → (D,): the t-th bit is flag t."""
    weights = (1 << np.arange(len(flags))).astype(np.uint16)
    return (flags.T @ weights).astype(np.uint16)
