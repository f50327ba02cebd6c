"""COCO's own evaluation of a whole data set at once, which visionfast's, image by image, has to equal; data for it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.postprocess.masks import InstanceMasks
from visionfast.results import Detections
from visionfast.verify_dataset import LabelledObject
from visionfast.verify_matches import Kind, Matcher, Matches

__all__ = [
    "CATEGORIES",
    "IMAGE_HW",
    "Scene",
    "coco_precisions",
    "found",
    "labelled",
    "matched",
    "random_scene",
    "untied",
]

IMAGE_HW = (240, 320)
CATEGORIES = (7, 3, 90)  # in no order, as an engine's class names are


@dataclass(frozen=True)
class Scene:
    """One image: what is on it and what was found."""

    there: tuple[LabelledObject, ...]
    found: Detections


def matched(scenes: Sequence[Scene], kind: Kind = "boxes", categories: Sequence[int] = CATEGORIES) -> Matches:
    matcher = Matcher(kind, dict(enumerate(categories)))
    for scene in scenes:
        matcher.add(scene.there, scene.found)
    return matcher.matches()


def found(xyxy: Any, confidence: Any = 0.9, class_id: Any = 0) -> Detections:
    boxes = np.asarray(xyxy, np.float32).reshape(-1, 4)
    n = len(boxes)
    return Detections(
        boxes, np.broadcast_to(np.float32(confidence), n), np.broadcast_to(np.int64(class_id), n), IMAGE_HW
    )


def labelled(
    xywh: tuple[float, float, float, float], category: int = CATEGORIES[0], *, crowd: bool = False
) -> LabelledObject:
    return LabelledObject(category, xywh, xywh[2] * xywh[3], crowd)


def untied(scene: Scene, rng: np.random.Generator) -> Scene:
    """With scores of which no two are equal: those stand in the images' order."""
    answer = scene.found
    scores = (np.sort(rng.permutation(10_000)[: len(answer)])[::-1] + 1) / 20_000
    return Scene(scene.there, dataclasses.replace(answer, confidence=scores.astype(np.float32)))


def coco_precisions(scenes: Sequence[Scene], *, categories: Sequence[int], kind: str) -> npt.NDArray[np.float64]:
    """(A, T, K): areas, overlaps, classes; NaN where there is no object. Class id = position in `categories`."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    height, width = IMAGE_HW
    gt = COCO()
    gt.dataset = {
        "info": {},
        "images": [{"id": number, "height": height, "width": width} for number in range(len(scenes))],
        "categories": [{"id": number, "name": str(number)} for number in sorted(categories)],
        "annotations": [
            {
                "id": 1 + 1000 * image + number,
                "image_id": image,
                "category_id": thing.category_id,
                "bbox": list(thing.xywh),
                "area": thing.area,
                "iscrowd": int(thing.crowd),
                "segmentation": thing.segmentation,
            }
            for image, scene in enumerate(scenes)
            for number, thing in enumerate(scene.there)
        ],
    }
    results: list[dict[str, Any]] = []
    for image, scene in enumerate(scenes):
        rles = scene.found.mask.rle() if scene.found.mask is not None else []
        for i in range(len(scene.found)):
            left, top, right, bottom = scene.found.xyxy[i].astype(float).tolist()
            shape = {"segmentation": rles[i]} if kind == "masks" else {"bbox": [left, top, right - left, bottom - top]}
            results.append(
                {
                    "image_id": image,
                    "category_id": categories[int(scene.found.class_id[i])],
                    "score": float(scene.found.confidence[i]),
                }
                | shape
            )
    with contextlib.redirect_stdout(io.StringIO()):
        gt.createIndex()
        dt = gt.loadRes(results) if results else COCO()
        if not results:
            dt.dataset = gt.dataset | {"annotations": []}
            dt.createIndex()
        evaluation = COCOeval(gt, dt, "segm" if kind == "masks" else "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., -1]  # (T, R, K, A) at a hundred objects
    order = [sorted(categories).index(category) for category in categories]
    means = np.where(precision[:, 0] < 0, np.nan, precision.mean(axis=1))[:, order]  # (T, K, A)
    return np.moveaxis(means, 2, 0)


def random_scene(rng: np.random.Generator, categories: Sequence[int], *, masks: bool) -> Scene:
    """Objects of all three sizes, some of them crowds; found, found beside, missed, invented; scores with ties."""
    there, boxes, scores, classes = [], [], [], []
    height, width = IMAGE_HW
    for _ in range(rng.integers(0, 7)):
        index = int(rng.integers(len(categories)))
        size = rng.choice([12.0, 32.0, 60.0, 130.0], 2)
        corner = np.floor(rng.uniform(0, 1, 2) * (width - size[0], height - size[1]))
        box = np.concatenate([corner, corner + size])
        there.append(_labelled(categories[index], box, crowd=bool(rng.random() < 0.2), masks=masks, rng=rng))
        for _ in range(rng.integers(0, 3)):
            boxes.append(box + rng.normal(0, rng.choice([0.0, 3.0, 12.0]), 4).round())
            scores.append(rng.choice([0.2, 0.5, 0.9]) if rng.random() < 0.5 else rng.random())
            classes.append(index if rng.random() < 0.8 else int(rng.integers(len(categories))))
    order = np.argsort(-np.array(scores), kind="stable").astype(int)
    xyxy = np.array(boxes, np.float32).reshape(-1, 4)[order]
    xyxy[:, 2:] = np.maximum(xyxy[:, :2], xyxy[:, 2:])
    mask = None
    if masks:
        planes = np.zeros((len(xyxy), *IMAGE_HW), bool)
        for plane, (left, top, right, bottom) in zip(planes, np.clip(xyxy, 0, None).astype(int), strict=True):
            plane[top:bottom, left:right] = True
            plane[top : top + 2, left : left + 5] = False
        mask = InstanceMasks.from_dense(planes)
    confidence = np.array(scores, np.float32)[order]
    found = Detections(xyxy, confidence, np.array(classes, np.int64)[order], IMAGE_HW, mask)
    return Scene(tuple(there), found)


def _labelled(
    category: int, box: npt.NDArray[Any], *, crowd: bool, masks: bool, rng: np.random.Generator
) -> LabelledObject:
    left, top, right, bottom = box.tolist()
    segmentation: Any = None
    if crowd and masks:
        plane = np.zeros(IMAGE_HW, bool)
        plane[int(top) : int(bottom), int(left) : int(right)] = True
        (segmentation,) = InstanceMasks.from_dense(plane[None]).rle()
    elif masks:
        segmentation = [[left, top, right, top, right, bottom, left, bottom]]
    area = (right - left) * (bottom - top) * rng.choice([0.7, 1.0])  # on the limits of small and large, too
    return LabelledObject(category, (left, top, right - left, bottom - top), area, crowd, segmentation)
