"""Candidates against their definition, and boxes against ultralytics' arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from visionfast.postprocess.boxes import (
    Candidates,
    above_confidence,
    cxcywh_to_xyxy,
    select_candidates,
    select_candidates_reference,
    unletterbox_boxes,
)
from visionfast.preprocess.reference import letterbox_geometry

# Few distinct values, so that ties are the rule; the awkward ones among them.
SCORES = st.sampled_from([0.0, 0.25, 0.5, 0.5000001, 0.9, 1.0, np.nan, np.inf, -np.inf])
COORDINATES = st.sampled_from([0.0, -3.0, 0.1, 7.5, 640.0, 3e38, np.nan, np.inf, -np.inf])


def _predictions(scores: list[list[float]], boxes: list[list[float]] | None = None) -> np.ndarray:
    """From (A, C) scores and (A, 4) boxes."""
    columns = np.array(scores, np.float32).reshape(len(scores), -1)
    corners = np.tile([50, 50, 10, 10], (len(columns), 1)) if boxes is None else np.array(boxes)
    return np.concatenate((corners, columns), axis=1).T.astype(np.float32)


def _assert_same(a: Candidates, b: Candidates) -> None:
    for name in ("anchor", "xyxy", "confidence", "class_id"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        assert getattr(a, name).dtype == getattr(b, name).dtype


@given(data=st.data(), conf=st.sampled_from([0.0, 0.25, 0.5, 1.0]), limit=st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_fast_equals_definition(data: st.DataObject, conf: float, limit: int) -> None:
    anchors, num_classes, extra = (data.draw(st.integers(lo, hi)) for lo, hi in ((0, 12), (1, 4), (0, 2)))
    predictions = np.concatenate(
        [
            data.draw(hnp.arrays(np.float32, (rows, anchors), elements=elements.map(np.float32)))
            for rows, elements in ((4, COORDINATES), (num_classes, SCORES), (extra, SCORES))
        ]
    )
    classes = data.draw(st.none() | st.lists(st.integers(0, num_classes - 1), min_size=1))
    options = {"conf": conf, "classes": classes, "max_candidates": limit}
    fast = select_candidates(predictions, num_classes, **options)
    _assert_same(fast, select_candidates_reference(predictions, num_classes, **options))
    assert np.isfinite(fast.confidence).all()
    assert np.isfinite(fast.xyxy).all()

    # The columns that can be chosen give the same by themselves, and with columns of zeros behind them.
    above = above_confidence(predictions, num_classes, conf)
    for padding in (0, 3):
        few = np.pad(predictions[:, above], ((0, 0), (0, padding)))
        chosen = select_candidates(few, num_classes, **options)
        _assert_same(replace(chosen, anchor=above[chosen.anchor]), fast)


@pytest.mark.parametrize(
    ("scores", "anchors", "class_ids"),
    [
        ([], [], []),
        ([[0.25, 0.1]], [], []),  # strictly above
        ([[0.3, 0.3]], [0], [0]),  # of equal classes the lowest
        ([[0.3, 0.4], [0.9, 0.1], [0.4, 0.2]], [1, 0, 2], [0, 1, 0]),  # by confidence, ties by anchor
        ([[np.nan, 0.9], [np.inf, 0.9], [0.9, -np.inf]], [2], [0]),
    ],
)
def test_rules(scores: list[list[float]], anchors: list[int], class_ids: list[int]) -> None:
    predictions = _predictions(scores) if scores else np.zeros((6, 0), np.float32)
    found = select_candidates(predictions, 2, conf=0.25)
    assert found.anchor.tolist() == anchors
    assert found.class_id.tolist() == class_ids


def test_classes_choose_by_the_best_class_alone() -> None:
    # As ultralytics: an anchor is its best class, not the best of the allowed ones.
    found = select_candidates(_predictions([[0.9, 0.8], [0.3, 0.4]]), 2, conf=0.25, classes=[1])
    assert found.anchor.tolist() == [1]


def test_confidence_is_compared_in_float32() -> None:
    assert len(select_candidates(_predictions([[0.1]]), 1, conf=0.1).anchor) == 0


def test_results_own_their_memory() -> None:
    predictions = _predictions([[0.9], [0.8]])
    found = select_candidates(predictions, 1, conf=0.25)
    for array in (found.xyxy, found.confidence, found.class_id, found.anchor):
        assert not np.shares_memory(array, predictions)


def test_corners() -> None:
    boxes = np.array([[10, 20, 4, 6], [0.5, 0.5, 1, 0]], np.float32)
    np.testing.assert_array_equal(cxcywh_to_xyxy(boxes), [[8, 17, 12, 23], [0, 0.5, 1, 0.5]])
    np.testing.assert_array_equal(boxes[0], [10, 20, 4, 6])


@given(
    image_hw=st.tuples(st.integers(1, 5000), st.integers(1, 5000)) | st.just((1, 1)) | st.just((3, 4000)),
    size_hw=st.sampled_from([(640, 640), (384, 640), (32, 1280)]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_unletterbox_is_bit_for_bit_ultralytics(image_hw: tuple[int, int], size_hw: tuple[int, int], seed: int) -> None:
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("ultralytics.utils.ops")
    xyxy = np.random.default_rng(seed).uniform(-50, 1400, (20, 4)).astype(np.float32)
    ours = unletterbox_boxes(xyxy, letterbox_geometry(image_hw, size_hw))
    theirs = ops.scale_boxes(size_hw, torch.from_numpy(xyxy.copy()), image_hw).numpy()
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == np.float32


def test_unletterbox_of_nothing() -> None:
    assert unletterbox_boxes(np.zeros((0, 4), np.float32), letterbox_geometry((5, 9), (640, 640))).shape == (
        0,
        4,
    )
