"""Matches image by image are COCO's own: the same average precisions as pycocotools gives for a whole data set."""

from __future__ import annotations

import numpy as np
import pytest
from coco_reference import CATEGORIES, IMAGE_HW, Scene, coco_precisions, found, labelled, matched, random_scene
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.postprocess.masks import InstanceMasks
from visionfast.results import Detections
from visionfast.verify_dataset import LabelledObject
from visionfast.verify_matches import AREAS, IOUS, Kind
from visionfast.verify_precision import average_precisions


@pytest.mark.parametrize("kind", ["boxes", "masks"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), images=st.integers(1, 5))
def test_as_pycocotools_has_it(kind: Kind, seed: int, images: int) -> None:
    rng = np.random.default_rng(seed)
    scenes = [random_scene(rng, CATEGORIES, masks=kind == "masks") for _ in range(images)]
    expected = coco_precisions(scenes, categories=CATEGORIES, kind=kind)
    matches = matched(scenes, kind)
    for area, of_area in zip(AREAS, expected, strict=True):
        np.testing.assert_allclose(average_precisions(matches, area=area)[0], of_area, rtol=0, atol=1e-12)


def test_more_than_a_hundred_of_a_class() -> None:
    """Those beyond COCO's hundred count neither way; a crowded image has more than 256 masks in one call."""
    rng = np.random.default_rng(5)
    corners = rng.uniform(0, 200, (300, 2)).round()
    boxes = np.concatenate([corners, corners + 30], axis=1)
    scores = np.sort(rng.random(300)).astype(np.float32)[::-1]
    things = tuple(labelled((left, top, 30, 30)) for left, top in corners.tolist())
    scene = Scene(things, found(boxes, scores))
    matches = matched([scene])
    assert len(matches.found) == 100
    assert matches.objects == 300
    expected = coco_precisions([scene], categories=CATEGORIES, kind="boxes")
    np.testing.assert_allclose(average_precisions(matches)[0], expected[0], rtol=0, atol=1e-12)


def perfect(rng: np.random.Generator, by: float = 0.0) -> Scene:
    """What is there, found exactly, or beside by so many pixels; boxes and masks."""
    things, boxes, planes = [], [], []
    for category in CATEGORIES:
        left, top = rng.integers(0, 100, 2).tolist()
        width, height = rng.integers(40, 90, 2).tolist()
        corners = [left, top, left + width, top, left + width, top + height, left, top + height]
        things.append(LabelledObject(category, (left, top, width, height), width * height, False, [corners]))
        boxes.append([left + by, top, left + width + by, top + height])
        plane = np.zeros(IMAGE_HW, bool)
        plane[top : top + height, left + round(by) : left + width + round(by)] = True
        planes.append(plane)
    mask = InstanceMasks.from_dense(np.array(planes))
    answer = Detections(
        np.array(boxes, np.float32), np.array([0.9, 0.8, 0.7], np.float32), np.arange(3), IMAGE_HW, mask
    )
    return Scene(tuple(things), answer)


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_perfect_answers_give_exactly_one(kind: Kind) -> None:
    """xyxy → xywh, and polygons beside run lengths, lose nothing."""
    rng = np.random.default_rng(0)
    precisions = average_precisions(matched([perfect(rng) for _ in range(4)], kind))
    assert precisions.shape == (1, len(IOUS), 3)
    assert (precisions == 1.0).all()


@pytest.mark.parametrize("kind", ["boxes", "masks"])
def test_answers_beside_give_less(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    precisions = average_precisions(matched([perfect(rng, by=6) for _ in range(4)], kind))[0]
    assert (precisions[0] == 1).all()  # an overlap of a half they have
    assert (precisions[-1] == 0).all()
    assert (np.diff(precisions, axis=0) <= 0).all()


def test_no_answers_give_nothing() -> None:
    rng = np.random.default_rng(0)
    scene = perfect(rng)
    matches = matched([Scene(scene.there, Detections.empty(IMAGE_HW))])
    assert len(matches.found) == 0
    assert (average_precisions(matches) == 0).all()


def test_an_image_without_objects_counts() -> None:
    box = [10, 10, 50, 50]
    there = Scene((labelled((10, 10, 40, 40)),), found(box, 0.5))
    elsewhere = Scene((), found(box, 0.9))
    assert average_precisions(matched([there]))[0, 0, 0] == 1
    assert average_precisions(matched([elsewhere, there]))[0, 0, 0] == 0.5


def test_what_is_found_in_a_crowd_counts_neither_way() -> None:
    there = (labelled((10, 10, 40, 40)), labelled((100, 50, 150, 150), crowd=True))
    in_crowd = [[110, 60, 140, 100], [150, 60, 190, 100]]
    matches = matched([Scene(there, found([[10, 10, 50, 50], *in_crowd], [0.1, 0.9, 0.8]))])
    assert matches.objects == 1
    assert (average_precisions(matches)[0, :, 0] == 1).all()


def test_other_classes_are_left_out() -> None:
    """Of the engine as of the data set."""
    there = (labelled((10, 10, 40, 40)), labelled((0, 0, 5, 5), category=55))
    answer = found([[10, 10, 50, 50], [10, 10, 50, 50]], [0.5, 0.9], [0, 17])
    matches = matched([Scene(there, answer)])
    assert matches.objects == len(matches.found) == 1
    assert np.isnan(average_precisions(matches)[0, :, 1:]).all()
    assert (average_precisions(matches)[0, :, 0] == 1).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_box_that_is_no_number_finds_nothing(wrong: float) -> None:
    """pycocotools would take its overlap, NaN, for a match."""
    answer = found([[10, 10, wrong, 50], [10, 10, 50, 50]], [0.9, 0.5])
    matches = matched([Scene((labelled((10, 10, 40, 40)),), answer)])
    assert matches.found["matched"][:, 0].tolist() == [0, 2 ** len(IOUS) - 1]
    assert (average_precisions(matches)[0, :, 0] == 0.5).all()


def test_boxes_without_area_match_nothing() -> None:
    answer = found([[10, 10, 10, 50], [0, 0, 0, 0]])
    matches = matched([Scene((labelled((10, 10, 0, 40)),), answer)])
    assert not matches.found["matched"].any()
    assert (average_precisions(matches)[0, :, 0] == 0).all()


def test_equal_scores_stand_as_they_were_found() -> None:
    answer = found([[100, 100, 140, 140], [10, 10, 50, 50]], 0.5)
    first = matched([Scene((labelled((10, 10, 40, 40)),), answer)])
    second = matched([Scene((labelled((10, 10, 40, 40)),), answer[[1, 0]])])
    assert average_precisions(first)[0, 0, 0] == 0.5
    assert average_precisions(second)[0, 0, 0] == 1
