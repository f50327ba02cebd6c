"""NMS against its definition and against torchvision."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.postprocess import nms as nms_module
from visionfast.postprocess.nms import box_iou, nms, nms_reference


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boxes on a coarse grid: equal boxes, equal scores, boxes without area, IoUs that hit the threshold."""
    n = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    corner = rng.integers(0, 6, (n, 2)) * draw(st.sampled_from([1.0, 0.1, 1000.3]))
    size = rng.integers(0, 6, (n, 2)) * draw(st.sampled_from([1.0, 0.7, 333.3]))
    xyxy = np.concatenate((corner, corner + size), axis=1).astype(np.float32)
    confidence = (rng.integers(0, 5, n) / 5).astype(np.float32)
    return xyxy, confidence, rng.integers(0, draw(st.integers(1, 3)), n)


THRESHOLDS = st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 0.5, 0.6, 0.7, 1.0])


@given(
    boxes=_boxes(),
    iou=THRESHOLDS,
    max_det=st.integers(1, 45),
    agnostic=st.booleans(),
    block=st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_fast_equals_definition(boxes, iou: float, max_det: int, agnostic: bool, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nms_module, "_BLOCK", block)  # many blocks from few boxes
        fast = nms(*boxes, iou=iou, max_det=max_det, class_agnostic=agnostic)
    expected = nms_reference(*boxes, iou=iou, max_det=max_det, class_agnostic=agnostic)
    np.testing.assert_array_equal(fast, expected)
    assert fast.dtype == np.int64


@given(boxes=_boxes(), iou=THRESHOLDS)
@settings(max_examples=150, deadline=None)
def test_agnostic_equals_torchvision(boxes, iou: float) -> None:
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("torchvision.ops")
    xyxy, confidence, class_id = boxes
    expected = ops.nms(torch.from_numpy(xyxy), torch.from_numpy(confidence), iou).numpy()
    ours = nms(xyxy, confidence, class_id, iou=iou, max_det=100, class_agnostic=True)
    np.testing.assert_array_equal(ours, expected)


@given(boxes=_boxes(), iou=THRESHOLDS)
@settings(max_examples=100, deadline=None)
def test_class_aware_is_torchvision_class_by_class(boxes, iou: float) -> None:
    # batched_nms moves classes apart by an offset and so loses bits; nms for each class is the exact meaning.
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("torchvision.ops")
    xyxy, confidence, class_id = boxes
    expected = []
    for c in np.unique(class_id):
        members = np.flatnonzero(class_id == c)
        kept = ops.nms(torch.from_numpy(xyxy[members]), torch.from_numpy(confidence[members]), iou).numpy()
        expected += members[kept].tolist()
    expected.sort(key=lambda i: (-confidence[i], i))
    assert nms(xyxy, confidence, class_id, iou=iou, max_det=100).tolist() == expected


def test_thousands_of_boxes_equal_torchvision_batched() -> None:
    torch, ops = pytest.importorskip("torch"), pytest.importorskip("torchvision.ops")
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 600, (5000, 2))  # whole numbers: the offset of batched_nms costs no bits
    xyxy = np.concatenate((corner, corner + rng.integers(1, 60, (5000, 2))), axis=1).astype(np.float32)
    confidence, class_id = rng.random(5000, dtype=np.float32), rng.integers(0, 3, 5000)
    expected = ops.batched_nms(torch.from_numpy(xyxy), torch.from_numpy(confidence), torch.from_numpy(class_id), 0.3)
    np.testing.assert_array_equal(nms(xyxy, confidence, class_id, iou=0.3, max_det=5000), expected.numpy())


def test_threshold_is_strict() -> None:
    xyxy = np.array([[0, 0, 2, 1], [1, 0, 2, 1]], np.float32)  # IoU 0.5
    confidence, class_id = np.array([0.9, 0.8], np.float32), np.zeros(2, np.int64)
    assert nms(xyxy, confidence, class_id, iou=0.5, max_det=9).tolist() == [0, 1]
    assert nms(xyxy, confidence, class_id, iou=0.49, max_det=9).tolist() == [0]


def test_threshold_that_float32_rounds_up() -> None:
    # IoU is float32(0.1), above 0.1 in doubles, as torchvision compares; in float32 they would be equal.
    xyxy = np.array([[0, 0, 10, 1], [0, 0, 1, 1]], np.float32)
    assert nms(xyxy, np.ones(2, np.float32), np.zeros(2, np.int64), iou=0.1, max_det=9).tolist() == [0]


def test_boxes_without_area_suppress_nothing() -> None:
    xyxy = np.array([[5, 5, 5, 5], [5, 5, 5, 5], [0, 0, 9, 9]], np.float32)
    assert np.isnan(box_iou(xyxy[:1], xyxy[1:2])).all()
    kept = nms(xyxy, np.array([0.9, 0.8, 0.7], np.float32), np.zeros(3, np.int64), iou=0.0, max_det=9)
    assert kept.tolist() == [0, 1, 2]


def test_areas_that_overflow_do_not_crash() -> None:
    xyxy = np.array([[-1e38, -1e38, 1e38, 1e38]] * 2, np.float32)
    assert len(nms(xyxy, np.ones(2, np.float32), np.zeros(2, np.int64), iou=0.5, max_det=9)) == 2


def test_memory_is_bounded() -> None:
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 600, (30_000, 2)).astype(np.float32)
    xyxy = np.concatenate((corner, corner + 30), axis=1)
    confidence, class_id = rng.random(30_000, dtype=np.float32), rng.integers(0, 80, 30_000)
    tracemalloc.start()
    try:
        kept = nms(xyxy, confidence, class_id, iou=0.7, max_det=300)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(kept) == 300
    assert peak_bytes < 16 << 20  # the full IoU matrix would be 3.6 GB
