"""The definition itself: geometry against ultralytics' own letterbox, pixels against arithmetic done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.errors import ShapeError
from visionfast.preprocess.reference import letterbox, letterbox_geometry, normalise, resize_bilinear
from visionfast.types import PreprocessSpec

SIDES = st.one_of(st.integers(1, 12), st.integers(1, 5000), st.just(65535))
SIZES = st.tuples(st.integers(1, 40).map(lambda n: 32 * n), st.integers(1, 40).map(lambda n: 32 * n))


@pytest.mark.parametrize(
    ("image_hw", "size_hw", "resized_hw", "top", "left"),
    [
        pytest.param((1080, 810), (640, 640), (640, 480), 0, 80, id="bus"),
        pytest.param((720, 1280), (640, 640), (360, 640), 140, 0, id="zidane"),
        pytest.param((640, 640), (640, 640), (640, 640), 0, 0, id="as it is"),
        pytest.param((1, 1), (640, 640), (640, 640), 0, 0, id="one pixel"),
        pytest.param((1, 5000), (640, 640), (1, 640), 319, 0, id="thin"),
        pytest.param((5000, 1), (384, 640), (384, 1), 0, 319, id="tall"),
        pytest.param((3, 1280), (640, 640), (2, 640), 319, 0, id="1.5 rounds to 2"),
        pytest.param((5, 1280), (640, 640), (2, 640), 319, 0, id="2.5 rounds to 2: half to even"),
        pytest.param((639, 640), (640, 640), (639, 640), 0, 0, id="the odd pixel of padding lies below"),
    ],
)
def test_geometry(image_hw, size_hw, resized_hw, top, left):
    geometry = letterbox_geometry(image_hw, size_hw)
    assert (geometry.resized_hw, geometry.top, geometry.left) == (resized_hw, top, left)


@given(image_hw=st.tuples(SIDES, SIDES), size_hw=SIZES)
def test_geometry_lies_inside_the_input_and_touches_two_of_its_sides(image_hw, size_hw):
    geometry = letterbox_geometry(image_hw, size_hw)
    (h, w), (new_h, new_w) = size_hw, geometry.resized_hw
    assert 1 <= new_h <= h
    assert 1 <= new_w <= w
    assert new_h == h or new_w == w
    assert 0 <= (h - new_h) - 2 * geometry.top <= 1
    assert 0 <= (w - new_w) - 2 * geometry.left <= 1


@settings(max_examples=60, deadline=None)
@given(
    image_hw=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    size_hw=st.sampled_from([(640, 640), (384, 640), (64, 32)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_equals_the_letterbox_that_the_networks_are_trained_with(image_hw, size_hw, seed):
    augment = pytest.importorskip("ultralytics.data.augment")
    image = np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)
    theirs = augment.LetterBox(size_hw, auto=False, center=True)(image=image)
    ours, _ = letterbox(image, PreprocessSpec(size_hw))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("image_hw", [(0, 5), (5, 0)])
def test_geometry_refuses_an_image_of_nothing(image_hw):
    with pytest.raises(ShapeError, match="at least 1 pixel"):
        letterbox_geometry(image_hw, (640, 640))


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)],
    ids=["grey", "alpha", "float"],
)
def test_letterbox_refuses_another_shape(image):
    with pytest.raises(ShapeError, match=r"expected \(H, W, 3\) uint8"):
        letterbox(image, PreprocessSpec((32, 32)))


def test_doubling_a_row_by_hand():
    row = np.repeat(np.array([[0, 100, 200]], np.uint8)[:, :, None], 3, axis=2)
    doubled = resize_bilinear(row, (1, 6))
    assert doubled[0, :, 0].tolist() == [0, 25, 75, 125, 175, 200]  # edges repeated, quarters in between


def test_halving_takes_the_mean_of_four():
    image = np.repeat(np.array([[0, 1], [2, 255]], np.uint8)[:, :, None], 3, axis=2)
    assert resize_bilinear(image, (1, 1))[0, 0].tolist() == [65, 65, 65]  # 64.5, half up


@settings(max_examples=60, deadline=None)
@given(
    hw=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    size_hw=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    seed=st.integers(0, 2**32 - 1),
)
def test_resize_is_within_one_level_of_real_arithmetic(hw, size_hw, seed):
    image = np.random.default_rng(seed).integers(0, 256, (*hw, 3), dtype=np.uint8)

    def taps(length, source):
        position = np.clip((np.arange(length) + 0.5) * (source / length) - 0.5, 0, source - 1)
        first = np.floor(position).astype(int)
        return first, np.minimum(first + 1, source - 1), position - first

    (y0, y1, fy), (x0, x1, fx) = taps(size_hw[0], hw[0]), taps(size_hw[1], hw[1])
    fy, fx = fy[:, None, None], fx[None, :, None]
    rows = image[y0] * (1 - fy) + image[y1] * fy
    real = rows[:, x0] * (1 - fx) + rows[:, x1] * fx
    assert np.abs(resize_bilinear(image, size_hw) - real).max() <= 1


def test_normalise_is_planar_rgb():
    canvas = np.zeros((2, 3, 3), np.uint8)
    canvas[..., 0], canvas[..., 2] = 255, 51
    spec = PreprocessSpec((2, 3), mean=(0.5, 0.0, 0.2), std=(0.5, 1.0, 2.0))
    planes = normalise(canvas, spec)
    assert planes.shape == (3, 2, 3)
    assert planes.dtype == np.float32
    assert planes[:, 0, 0].tolist() == [1.0, 0.0, 0.0]
