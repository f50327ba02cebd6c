"""The detection kernels equal their definition, ties included: on anything that may come, and case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from detections_definition import BUS, MAX_CANDIDATES, Predictions, Setting, predictions_of, run
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.postprocess.kernels import detections as module
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox

# ---- anything that may come -------------------------------------------------------------------------------

NOT_FINITE = np.array([np.nan, np.inf, -np.inf], np.float32)


@st.composite
def _anything(draw: st.DrawFn) -> tuple[Predictions, list[Letterbox | None], Setting]:
    """Coarse grids, so that scores tie, boxes coincide and IoUs hit the threshold; and what is not a box at all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, anchors = draw(st.integers(1, 3)), draw(st.integers(1, 300))
    num_classes, coefficients = draw(st.sampled_from([1, 2, 3, 5, 64, 65, 80])), draw(st.sampled_from([0, 2]))
    predictions = np.empty((batch, 4 + num_classes + coefficients, anchors), np.float32)
    spread = draw(st.sampled_from([2, 8, 60]))
    predictions[:, :2] = rng.integers(0, spread, (batch, 2, anchors)) * draw(st.sampled_from([1.0, 10.7]))
    predictions[:, 2:4] = rng.integers(-1, 6, (batch, 2, anchors)) * draw(st.sampled_from([1.0, 0.3, 25.9]))
    if draw(st.booleans()):
        scores = rng.integers(-1, 8, (batch, num_classes, anchors)) / 8
    else:
        scores = rng.random((batch, num_classes, anchors)) ** 8
    predictions[:, 4 : 4 + num_classes] = scores
    predictions[:, 4 + num_classes :] = np.nan  # coefficients are no business of these kernels
    if draw(st.booleans()):
        rare = rng.random((batch, 4 + num_classes, anchors)) < 0.3 / (4 + num_classes)
        predictions[:, : 4 + num_classes][rare] = rng.choice(NOT_FINITE, int(rare.sum()))
    if draw(st.booleans()):
        rare = rng.random((batch, 4, anchors)) < 0.1
        predictions[:, :4][rare] = rng.choice(np.float32([3e38, -3e38, 1e20, 1e-30, 0.0]), int(rare.sum()))
    sizes = st.tuples(st.integers(1, 3000), st.integers(1, 3000))
    letterboxes = [letterbox_geometry(draw(sizes), (64, 96)) if draw(st.integers(0, 5)) else None for _ in range(batch)]
    setting = Setting(
        num_classes=num_classes,
        conf=draw(st.sampled_from([0.0, 0.001, 0.125, 0.25, 0.3, 0.875, 1.0])),
        iou=draw(st.sampled_from([0.0, 1e-46, 0.2, 1 / 3, 0.5, 0.6, 0.7, 1.0])),
        max_det=draw(st.sampled_from([1, 2, 7, 64, 300, 1000])),
        classes=draw(st.none() | st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=4)),
        class_agnostic=draw(st.booleans()),
        max_candidates=draw(st.sampled_from([1, 50, 129, MAX_CANDIDATES])),
    )
    return predictions, letterboxes, setting


SMALL = replace(module._INTERPRETER, mine=64, others=64, rows=32, words=1, judges=4)


@given(
    case=_anything(),
    block_and_side=st.sampled_from([(64, 64), (64, 128), (256, 4096)]),
    tiles=st.sampled_from([module._INTERPRETER, SMALL]),
)
@settings(max_examples=100, deadline=None)
def test_kernels_equal_definition(case: Any, block_and_side: tuple[int, int], tiles: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Several steps of the suppression from few candidates, some of them beyond the square of pairs.
        for name, value in zip(("_BLOCK", "_MAX_SIDE"), block_and_side, strict=True):
            patch.setattr(module, name, value)
        patch.setattr(module, "_INTERPRETER", tiles)
        run(*case)


@given(case=_anything())
@settings(max_examples=10, deadline=None)
def test_with_the_gpus_tiles(case: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_INTERPRETER", module._GPU)
        run(*case)


# ---- one by one -------------------------------------------------------------------------------------------


def test_no_candidate() -> None:
    setting = Setting(3)
    assert len(run(np.zeros((1, 7, 5), np.float32), [BUS], setting)[0].xyxy) == 0


def test_no_image_has_no_objects() -> None:
    certain = predictions_of([[0, 0, 10, 10]], [[0.9]])
    first, second, third = run(np.repeat(certain, 3, axis=0), [None, BUS, None], Setting(1))
    assert (len(first.xyxy), len(second.xyxy), len(third.xyxy)) == (0, 1, 0)


def test_ties_go_by_anchor_and_by_lowest_class() -> None:
    apart = [[20 * i, 0, 20 * i + 10, 10] for i in range(40)]
    (found,) = run(predictions_of(apart, np.full((40, 5), 0.5)), [BUS], Setting(5, max_det=30))
    np.testing.assert_array_equal(found.anchor, np.arange(30))
    assert not found.class_id.any()


@pytest.mark.parametrize("tied", [(0, 1), (5, 69), (63, 64), (69, 133), (149, 199)])
def test_of_equal_scores_the_lowest_class_is_it(tied: tuple[int, int]) -> None:
    """Within one pass over the classes, and from one to a later."""
    scores = np.full((1, 200), 0.2, np.float32)
    scores[0, list(tied)] = 0.5
    (found,) = run(predictions_of([[0, 0, 10, 10]], scores), [BUS], Setting(200))
    np.testing.assert_array_equal(found.class_id, [tied[0]])


def test_of_identical_boxes_the_first_stays() -> None:
    (found,) = run(predictions_of([[5, 5, 50, 50]] * 600, np.full((600, 1), 0.5)), [BUS], Setting(1))
    np.testing.assert_array_equal(found.anchor, [0])


def test_boxes_without_area_neither_suppress_nor_are_suppressed() -> None:
    boxes = [[10, 10, 10, 10]] * 3 + [[0, 0, 20, 20]] * 2 + [[10, 0, 10, 20]] * 2
    (found,) = run(predictions_of(boxes, np.full((7, 1), 0.5)), [BUS], Setting(1, iou=0.0))
    np.testing.assert_array_equal(found.anchor, [0, 1, 2, 3, 5, 6])


@pytest.mark.parametrize("max_side", [256, 4096])
def test_chain_in_which_each_box_overlaps_the_next(max_side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one stays; no round of the search can know of more than one link."""
    monkeypatch.setattr(module, "_MAX_SIDE", max_side)
    boxes = [[4 * i, 0, 4 * i + 10, 10] for i in range(600)]  # IoU 6 / 14 with the next, 2 / 18 with the one after
    scores = np.linspace(0.9, 0.3, 600)[:, None]
    (found,) = run(predictions_of(boxes, scores), [BUS], Setting(1, iou=0.4, max_det=1000))
    np.testing.assert_array_equal(found.anchor, np.arange(0, 600, 2))


@pytest.mark.parametrize(("iou", "left"), [(0.5, 2), (np.nextafter(0.5, 0), 1), (0.7, 2), (0.7000001, 2)])
def test_iou_of_just_the_threshold_is_not_above_it(iou: float, left: int) -> None:
    """0.7 is no float32: the IoU is the one just below, and so must be what it is compared with."""
    height = 5 if iou < 0.6 else 7
    boxes = predictions_of([[0, 0, 10, 10], [0, 0, 10, height]], [[0.9], [0.8]])
    assert len(run(boxes, [BUS], Setting(1, iou=iou))[0].xyxy) == left


def test_scores_at_and_just_above_conf() -> None:
    conf = np.float32(0.3)
    scores = [conf, np.nextafter(conf, np.float32(1)), np.nextafter(conf, np.float32(0))]
    boxes = [[0, 0, 5, 5], [20, 0, 25, 5], [40, 0, 45, 5]]
    (found,) = run(predictions_of(boxes, [[s] for s in scores]), [BUS], Setting(1, conf=0.3))
    np.testing.assert_array_equal(found.anchor, [1])


def test_smallest_positive_score_at_conf_0() -> None:
    tiny = np.float32(1e-45)  # subnormal: a GPU that flushed it to zero would drop it
    (found,) = run(predictions_of([[0, 0, 5, 5]], [[tiny]]), [BUS], Setting(1, conf=0.0))
    np.testing.assert_array_equal(found.confidence, [tiny])


@pytest.mark.parametrize("bad", NOT_FINITE.tolist())
@pytest.mark.parametrize("row", range(6))
def test_anchor_that_is_not_finite_is_dropped(row: int, bad: float) -> None:
    predictions = predictions_of([[0, 0, 5, 5], [20, 0, 25, 5]], [[0.5, 0.9], [0.5, 0.9]])
    predictions[0, row, 0] = bad
    (found,) = run(predictions, [BUS], Setting(2))
    # minus infinity is only the score of a class that is certainly not there
    expected = [1] if row < 4 or bad != -np.inf else [0, 1] if row == 4 else [1, 0]
    np.testing.assert_array_equal(found.anchor, expected)


@pytest.mark.parametrize("centre", [3e38, -3e38])
@pytest.mark.parametrize("axis", [0, 1])
def test_anchor_with_one_corner_beyond_float32_is_dropped(axis: int, centre: float) -> None:
    predictions = predictions_of([[0, 0, 5, 5], [20, 0, 25, 5]], [[0.5], [0.5]])
    predictions[0, [axis, 2 + axis], 0] = centre, 3e38  # the other corner is at half of it
    (found,) = run(predictions, [BUS], Setting(1))
    np.testing.assert_array_equal(found.anchor, [1])


def test_only_asked_for_classes() -> None:
    boxes = [[20 * i, 0, 20 * i + 10, 10] for i in range(6)]
    (found,) = run(predictions_of(boxes, np.eye(6) * 0.9), [BUS], Setting(6, classes=[4, 1]))
    np.testing.assert_array_equal(found.class_id, [1, 4])


def test_boxes_partly_and_wholly_outside_are_clipped() -> None:
    boxes = [[-50, -50, 30, 30], [600, 600, 900, 700], [-90, 10, -60, 40], [900, 900, 950, 950]]
    (found,) = run(predictions_of(boxes, np.full((4, 1), 0.5)), [BUS], Setting(1))
    assert len(found.xyxy) == 4
    assert (found.xyxy >= 0).all()
    assert (found.xyxy <= [810, 1080, 810, 1080]).all()
