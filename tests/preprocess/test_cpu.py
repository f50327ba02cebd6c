"""The cv2 path: equal to the definition, and no pixel of an earlier image survives in a slot."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from visionfast.errors import ShapeError
from visionfast.preprocess import reference
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.types import PreprocessSpec

SIDES = st.one_of(st.integers(1, 4), st.integers(1, 800))
SIZES = st.sampled_from([(640, 640), (384, 640), (33, 97), (1, 1)])


def noise(image_hw, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)


@settings(max_examples=120, deadline=None)
@given(image_hw=st.tuples(SIDES, SIDES), size_hw=SIZES, seed=st.integers(0, 2**32 - 1))
@example(image_hw=(1, 1), size_hw=(640, 640), seed=0)
@example(image_hw=(1, 40_000), size_hw=(640, 640), seed=0)
@example(image_hw=(40_000, 1), size_hw=(640, 640), seed=0)
@example(image_hw=(640, 640), size_hw=(640, 640), seed=0)
@example(image_hw=(1280, 1280), size_hw=(640, 640), seed=0)
@example(image_hw=(639, 640), size_hw=(640, 640), seed=0)
def test_equals_the_definition_in_a_used_slot(image_hw, size_hw, seed):
    image = noise(image_hw, seed)
    untouched = image.copy()
    spec = PreprocessSpec(size_hw)
    slot = noise(size_hw, seed + 1)  # a stale image lies in it
    geometry = CpuPreprocessor(spec).write(image, slot)
    canvas, expected = reference.letterbox(image, spec)
    assert geometry == expected
    np.testing.assert_array_equal(slot, canvas)
    np.testing.assert_array_equal(image, untouched)


@settings(max_examples=60, deadline=None)
@given(image_hw=st.tuples(SIDES, SIDES), seed=st.integers(0, 2**32 - 1))
def test_equals_resize_and_copy_make_border(image_hw, seed):
    image = noise(image_hw, seed)
    (h, w) = size_hw = (384, 640)
    gain = min(h / image_hw[0], w / image_hw[1])
    new_w, new_h = max(1, round(image_hw[1] * gain)), max(1, round(image_hw[0] * gain))
    half_w, half_h = (w - new_w) / 2, (h - new_h) / 2
    composed = cv2.copyMakeBorder(
        cv2.resize(image, (new_w, new_h), interpolation=cv2.INTER_LINEAR),
        *(round(half_h - 0.1), round(half_h + 0.1), round(half_w - 0.1), round(half_w + 0.1)),
        cv2.BORDER_CONSTANT,
        value=(7, 7, 7),
    )
    slot = np.empty((*size_hw, 3), np.uint8)
    CpuPreprocessor(PreprocessSpec(size_hw, pad_value=7)).write(image, slot)
    np.testing.assert_array_equal(slot, composed)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[::-1],
        lambda a: a[:, ::-1],
        lambda a: a[..., ::-1],
        lambda a: a[::2, 1::3],
        lambda a: a.transpose(1, 0, 2),
    ],
    ids=["upside down", "mirrored", "BGR view", "strided", "transposed"],
)
def test_views_of_arrays(view):
    image = view(noise((50, 60)))
    spec = PreprocessSpec((64, 96))
    slot = np.empty((64, 96, 3), np.uint8)
    CpuPreprocessor(spec).write(image, slot)
    np.testing.assert_array_equal(slot, reference.letterbox(np.ascontiguousarray(image), spec)[0])


def test_writes_into_a_slot_of_a_batch_and_nowhere_else():
    spec = PreprocessSpec((64, 64))
    batch = np.full((3, 64, 64, 3), 9, np.uint8)
    CpuPreprocessor(spec).write(noise((20, 30)), batch[1])
    assert (batch[[0, 2]] == 9).all()
    np.testing.assert_array_equal(batch[1], reference.letterbox(noise((20, 30)), spec)[0])


def test_a_slot_that_is_not_contiguous_is_refused():
    slot = np.full((64, 64, 6), 9, np.uint8)[..., ::2]  # every other byte
    with pytest.raises(ShapeError, match="C-contiguous"):
        CpuPreprocessor(PreprocessSpec((64, 64))).write(noise((20, 30)), slot)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("mean", "std"),
    [((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))],
    ids=["yolo", "imagenet"],
)
def test_normalise_equals_the_definition(dtype, mean, std):
    spec = PreprocessSpec((33, 64), mean=mean, std=std)
    canvas = noise((2 * 33, 64)).reshape(2, 33, 64, 3)
    out = np.full((2, 3, 33, 64), np.nan, dtype)
    CpuPreprocessor(spec).normalise(canvas, out)
    expected = np.stack([reference.normalise(pixels, spec, dtype) for pixels in canvas])
    np.testing.assert_array_equal(out, expected)


def test_wrong_shapes_are_refused():
    preprocessor = CpuPreprocessor(PreprocessSpec((64, 96)))
    right = np.zeros((64, 96, 3), np.uint8)
    with pytest.raises(ShapeError, match=r"slot: expected \(64, 96, 3\) uint8, got \(96, 64, 3\)"):
        preprocessor.write(right, np.zeros((96, 64, 3), np.uint8))
    with pytest.raises(ShapeError, match=r"image: expected \(H, W, 3\) uint8"):
        preprocessor.write(np.zeros((4, 4), np.uint8), right)
    with pytest.raises(ShapeError, match=r"float32 or float16, got .* float64"):
        preprocessor.normalise(right[None], np.zeros((1, 3, 64, 96)))
