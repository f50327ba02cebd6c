"""Packed masks on the host: the format against its definition, and the way back against pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_boxes import random_boxes

from visionfast.errors import ShapeError
from visionfast.postprocess.masks import InstanceMasks
from visionfast.postprocess.packed import box_pixels, pack_reference, pixel_counts, unpack

IMAGES_HW = st.tuples(st.integers(1, 100), st.integers(1, 40)) | st.sampled_from(
    [(1, 1), (32, 1), (31, 3), (32, 3), (33, 3), (64, 5), (65, 2), (1, 70), (300, 2)]
)


def _inside(boxes: np.ndarray, image_hw: tuple[int, int]) -> np.ndarray:
    """(N, H, W) bool: the pixels of each box."""
    y, x = np.mgrid[: image_hw[0], : image_hw[1]]
    x1, y1, x2, y2 = boxes.T[:, :, None, None]
    return (x >= x1) & (x < x2) & (y >= y1) & (y < y2)


@given(image_hw=IMAGES_HW, n=st.integers(0, 6), density=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_unpacked_is_what_was_packed(image_hw: tuple[int, int], n: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = random_boxes(rng, n, image_hw)
    masks = rng.random((n, *image_hw)) < np.round(density, 1)
    if seed % 2:  # long runs rather than noise
        masks = np.repeat(masks[:, ::8], 8, axis=1)[:, : image_hw[0]]
    inside = masks & _inside(boxes, image_hw)
    words, offsets = pack_reference(masks, boxes)
    assert unpack(words, offsets, boxes, image_hw) == InstanceMasks.from_dense(inside)
    np.testing.assert_array_equal(pixel_counts(words, offsets), inside.sum(axis=(1, 2)))


def test_the_format() -> None:
    mask = np.zeros((1, 40, 4), np.bool_)
    mask[0, 3, 1] = mask[0, 34, 1] = mask[0, 36, 2] = True
    words, offsets = pack_reference(mask, np.array([[1, 2, 3, 37]], np.float32))
    # Rows 2 to 36 are two words a column; row 3 is bit 1, row 34 bit 0 of the second word, row 36 bit 2.
    assert words.tolist() == [0b10, 0b1, 0, 0b100]
    assert offsets.tolist() == [0, 4]
    top_bit, _ = pack_reference(np.ones((1, 32, 1), np.bool_), np.array([[0, 0, 1, 32]], np.float32))
    assert top_bit.tolist() == [-1]


def test_box_pixels() -> None:
    boxes = np.array([[2, 0, 5, 1], [2.1, 0.5, 5.1, 3], [-9, -9, 99, 99], [63.5, 0, 64, 1], [5, 5, 4, 9]], np.float32)
    expected = [[2, 0, 5, 1], [3, 1, 6, 3], [0, 0, 64, 48], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert box_pixels(boxes, (48, 64)).tolist() == expected
    assert box_pixels(np.zeros((0, 4), np.float32), (48, 64)).shape == (0, 4)


def test_runs_do_not_pass_from_an_object_to_the_next() -> None:
    # Full columns of 32 rows: the bit after each run is the first of the next column, or of the next object.
    boxes = np.array([[0, 0, 2, 32], [0, 0, 2, 32], [1, 8, 2, 40], [0, 8, 2, 40]], np.float32)
    masks = np.ones((4, 64, 2), np.bool_)
    words, offsets = pack_reference(masks, boxes)
    assert set(words.tolist()) == {-1}
    assert unpack(words, offsets, boxes, (64, 2)) == InstanceMasks.from_dense(_inside(boxes, (64, 2)))


def test_words_of_one_image_among_a_batch() -> None:
    rng = np.random.default_rng(0)
    boxes = random_boxes(rng, 7, (50, 30))
    masks = rng.random((7, 50, 30)) < 0.5
    words, offsets = pack_reference(masks, boxes)
    around = np.concatenate((np.full(5, -1, np.int32), words, np.full(9, -1, np.int32)))
    padded = np.concatenate((offsets + 5, np.full(3, offsets[-1] + 5)))  # as where max_det is 10
    assert unpack(around, padded, boxes, (50, 30)) == unpack(words, offsets, boxes, (50, 30))
    np.testing.assert_array_equal(pixel_counts(around, padded)[:7], pixel_counts(words, offsets))
    assert pixel_counts(around, padded)[7:].tolist() == [0, 0, 0]


def test_the_results_are_the_callers() -> None:
    words, offsets = pack_reference(np.ones((1, 4, 4), np.bool_), np.array([[0, 0, 4, 4]], np.float32))
    before = words.copy(), offsets.copy()
    unpack(words, offsets, np.array([[0, 0, 4, 4]], np.float32), (4, 4))
    pixel_counts(words, offsets)
    np.testing.assert_array_equal(words, before[0])
    np.testing.assert_array_equal(offsets, before[1])


def test_shape_errors() -> None:
    boxes = np.array([[0, 0, 4, 4]], np.float32)
    words, offsets = pack_reference(np.ones((1, 4, 4), np.bool_), boxes)
    with pytest.raises(ShapeError, match="offsets"):
        unpack(words, offsets, boxes * 2, (8, 8))
    with pytest.raises(ShapeError, match="offsets"):
        unpack(words, offsets[:1], boxes, (4, 4))
    with pytest.raises(ShapeError, match="words: expected at least 4, got 3"):
        unpack(words[:3], offsets, boxes, (4, 4))
