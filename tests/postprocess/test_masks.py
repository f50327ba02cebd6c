"""Run-length masks: their arithmetic is pycocotools', found without a dense plane."""

from __future__ import annotations

import json

import numpy as np
import pycocotools.mask as coco_mask
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from visionfast.errors import ShapeError
from visionfast.postprocess.masks import InstanceMasks, counts_from_runs, mask_iou, run_lengths

DENSE = st.tuples(st.integers(0, 3), st.integers(1, 7), st.integers(1, 7)).flatmap(
    lambda shape: hnp.arrays(np.bool_, shape)
)


# pycocotools 2.0.11 under NumPy 2, in decode.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def _counts(mask: np.ndarray) -> bytes:
    return coco_mask.encode(np.asfortranarray(mask, np.uint8))["counts"]


@given(mask=DENSE.filter(len).map(lambda masks: masks[0]), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_runs_equal_pycocotools_encoding(mask: np.ndarray, seed: int) -> None:
    flat = np.concatenate(([False], mask.ravel(order="F"), [False]))
    start, end = np.flatnonzero(flat[1:] & ~flat[:-1]), np.flatnonzero(~flat[1:] & flat[:-1])
    # Cut runs at random places, as strips and columns do: they have to be joined again.
    cuts = [
        position
        for a, b in zip(start, end, strict=True)
        for position in range(a + 1, b)
        if np.random.default_rng([seed, position]).random() < 0.3
    ]
    start, end = np.sort(np.append(start, cuts)), np.sort(np.append(end, cuts))
    assert counts_from_runs(start.astype(np.int64), end.astype(np.int64), mask.shape) == _counts(mask)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("image_hw", [(1, 1), (1, 5), (5, 1), (4, 3)])
def test_all_or_nothing(image_hw: tuple[int, int], fill: bool) -> None:
    start = np.array([0] if fill else [], np.int64)
    end = np.array([image_hw[0] * image_hw[1]] if fill else [], np.int64)
    assert counts_from_runs(start, end, image_hw) == _counts(np.full(image_hw, fill))


@given(dense=DENSE)
@settings(max_examples=100, deadline=None)
def test_round_trip(dense: np.ndarray) -> None:
    masks = InstanceMasks.from_dense(dense)
    assert len(masks) == len(dense)
    np.testing.assert_array_equal(masks.dense(), dense)
    np.testing.assert_array_equal(masks.area(), dense.sum(axis=(1, 2)))
    assert masks.area().dtype == np.int64
    for rle, mask in zip(json.loads(json.dumps(masks.rle())), dense, strict=True):
        np.testing.assert_array_equal(coco_mask.decode(rle), mask)


@given(lengths=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=12), inside=st.booleans())
@settings(max_examples=200, deadline=None)
def test_run_lengths_invert_pycocotools_compression(lengths: list[int], inside: bool) -> None:
    lengths = [0] * inside + lengths
    size = [sum(lengths), 1]
    counts = coco_mask.frPyObjects({"size": size, "counts": lengths}, *size)["counts"]
    assert run_lengths(counts).tolist() == lengths


def test_more_than_255_masks() -> None:
    # pycocotools.mask.area fails there in 2.0.11.
    dense = np.random.default_rng(0).random((300, 4, 5)) < 0.5
    masks = InstanceMasks.from_dense(dense)
    np.testing.assert_array_equal(masks.area(), dense.sum(axis=(1, 2)))
    assert masks.xywh().shape == (300, 4)
    np.testing.assert_array_equal(np.diag(mask_iou(masks, masks))[masks.area() > 0], 1)
    assert len(masks.polygons()) == 300


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(0, 0),
        slice(None, None, -1),
        np.array([2, 0, 2]),
        np.array([True, False, True]),
        [1],
        [],
        np.array([], np.int64),
        [False, False, True],
        [-1],
    ],
)
def test_indexing_is_numpys(index: object) -> None:
    dense = np.random.default_rng(1).random((3, 4, 5)) < 0.5
    chosen = np.array(index, np.int64) if isinstance(index, list) and not index else index
    selected = InstanceMasks.from_dense(dense)[index]
    assert isinstance(selected, InstanceMasks)
    np.testing.assert_array_equal(selected.dense(), dense[chosen])


def test_index_out_of_range() -> None:
    with pytest.raises(IndexError):
        InstanceMasks.from_dense(np.ones((2, 3, 3), bool))[[2]]


def test_empty() -> None:
    masks = InstanceMasks((), (3, 4))
    assert masks.dense().shape == (0, 3, 4)
    assert masks.area().shape == (0,)
    assert masks.xywh().shape == (0, 4)
    assert masks.rle() == masks.polygons() == []
    assert mask_iou(masks, InstanceMasks.from_dense(np.ones((2, 3, 4), bool))).shape == (0, 2)


def test_polygons_draw_the_mask_again() -> None:
    import cv2

    dense = np.zeros((3, 40, 50), np.uint8)
    cv2.circle(dense[0], (20, 18), 12, 1, -1)
    cv2.rectangle(dense[1], (0, 0), (5, 39), 1, -1)
    cv2.rectangle(dense[1], (30, 10), (49, 20), 1, -1)
    polygons = InstanceMasks.from_dense(dense != 0).polygons()
    assert [len(parts) for parts in polygons] == [1, 2, 0]
    for mask, parts in zip(dense, polygons, strict=True):
        np.testing.assert_array_equal(cv2.fillPoly(np.zeros_like(mask), parts, 1) if parts else 0 * mask, mask)


@given(pair=st.tuples(st.integers(1, 3), st.integers(1, 3)), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_mask_iou_counts_pixels(pair: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.random((n, 5, 6)) < 0.4 for n in pair)
    intersection = (a[:, None] & b).sum(axis=(2, 3))
    union = (a[:, None] | b).sum(axis=(2, 3))
    expected = intersection / np.maximum(union, 1)
    np.testing.assert_allclose(mask_iou(InstanceMasks.from_dense(a), InstanceMasks.from_dense(b)), expected)


def test_mask_iou_of_two_empty_masks_is_zero() -> None:
    empty = InstanceMasks.from_dense(np.zeros((1, 3, 3), bool))
    assert mask_iou(empty, empty).tolist() == [[0.0]]


def test_shape_errors() -> None:
    one = InstanceMasks.from_dense(np.ones((1, 3, 4), bool))
    with pytest.raises(ShapeError, match=r"\(3, 4\) and \(4, 3\)"):
        mask_iou(one, InstanceMasks.from_dense(np.ones((1, 4, 3), bool)))
    for shape in ((3, 4), (1, 0, 4)):
        with pytest.raises(ShapeError, match="expected"):
            InstanceMasks.from_dense(np.ones(shape, bool))
