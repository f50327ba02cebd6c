"""NV12 → RGB: the definition against OpenCV for every colour, and against the standards in real numbers."""

from __future__ import annotations

import itertools

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.errors import OptionError, ShapeError
from visionfast.preprocess.nv12 import nv12_to_rgb, yuv_to_rgb

EVEN = st.integers(1, 40).map(lambda n: 2 * n)
STANDARDS = list(itertools.product(["bt601", "bt709"], [False, True]))


def flat(y, u, v, sides=(2, 2)):
    """A frame of one colour."""
    uv = np.empty((sides[0] // 2, sides[1] // 2, 2), np.uint8)
    uv[...] = u, v
    return np.full(sides, y, np.uint8), uv


def test_equals_opencv_in_each_of_the_16_million_colours():
    uv = np.stack(np.meshgrid(np.arange(256), np.arange(256)), axis=-1).astype(np.uint8)  # every pair of U and V
    for first in range(0, 256, 4):
        block = np.array([[first, first + 1], [first + 2, first + 3]], np.uint8)
        y = np.tile(block, (256, 256))  # beside each of them four luma levels
        np.testing.assert_array_equal(nv12_to_rgb(y, uv), cv2.cvtColorTwoPlane(y, uv, cv2.COLOR_YUV2RGB_NV12))


@settings(max_examples=60, deadline=None)
@given(sides=st.tuples(EVEN, EVEN), seed=st.integers(0, 2**32 - 1))
def test_equals_opencv_at_every_size(sides, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 256, sides, dtype=np.uint8)
    uv = rng.integers(0, 256, (sides[0] // 2, sides[1] // 2, 2), dtype=np.uint8)
    np.testing.assert_array_equal(nv12_to_rgb(y, uv), cv2.cvtColorTwoPlane(y, uv, cv2.COLOR_YUV2RGB_NV12))


@pytest.mark.parametrize(("matrix", "full_range"), STANDARDS)
def test_is_the_inverse_of_the_standards_own_equations(matrix, full_range):
    red, blue = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}[matrix]
    luma = np.array([red, 1 - red - blue, blue])
    forward = np.stack([luma, ([0, 0, 1] - luma) / (2 * (1 - blue)), ([1, 0, 0] - luma) / (2 * (1 - red))])
    black, span, chroma_span = (0, 255, 255) if full_range else (16, 219, 224)
    yuv = np.stack(np.meshgrid(np.arange(black, 256, 7), np.arange(0, 256, 15), np.arange(0, 256, 15)), axis=-1)
    yuv = yuv.reshape(-1, 3)
    real = ((yuv - [black, 128, 128]) / [span, chroma_span, chroma_span]) @ np.linalg.inv(forward).T * 255
    for (y, u, v), expected in zip(yuv.tolist(), real.clip(0, 255), strict=True):
        got = nv12_to_rgb(*flat(y, u, v), matrix=matrix, full_range=full_range)[0, 0]
        # OpenCV's weights of three decimals are off by up to 0.2 levels before rounding.
        assert np.abs(got - expected).max() <= (0.7 if (matrix, full_range) == ("bt601", False) else 0.501)


@pytest.mark.parametrize(("matrix", "full_range"), STANDARDS)
def test_black_white_and_grey_have_no_colour(matrix, full_range):
    for y, level in ((0, 0), (255, 255)) if full_range else ((16, 0), (235, 255), (0, 0), (255, 255)):
        assert (nv12_to_rgb(*flat(y, 128, 128), matrix=matrix, full_range=full_range) == level).all()
    grey = nv12_to_rgb(*flat(100, 128, 128), matrix=matrix, full_range=full_range)
    assert len(np.unique(grey)) == 1


def test_a_pair_of_chroma_belongs_to_a_block_of_four_pixels():
    y = np.full((4, 4), 120, np.uint8)
    uv = np.full((2, 2, 2), 128, np.uint8)
    uv[1, 0] = 90, 240
    coloured = (np.ptp(nv12_to_rgb(y, uv).astype(int), axis=2) > 0).nonzero()
    assert list(zip(*map(np.ndarray.tolist, coloured), strict=True)) == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_pitched_planes():
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, (9, 64), dtype=np.uint8)
    y, uv = memory[:6, :10], memory[6:, :10].reshape(3, 5, 2)
    np.testing.assert_array_equal(nv12_to_rgb(y, uv), nv12_to_rgb(y.copy(), uv.copy()))


def test_the_weights_sum_within_32_bits():
    for matrix, full_range in STANDARDS:
        to = yuv_to_rgb(matrix, full_range)
        luma = (255 - to.black) * to.luma
        for chroma in (abs(to.v_to_red), abs(to.v_to_green) + abs(to.u_to_green), abs(to.u_to_blue)):
            assert luma + 128 * chroma + (1 << 19) < 2**31


@pytest.mark.parametrize(
    ("y", "uv", "message"),
    [
        pytest.param(np.zeros((3, 4), np.uint8), np.zeros((2, 2, 2), np.uint8), "y: expected .* even", id="odd height"),
        pytest.param(np.zeros((4, 3), np.uint8), np.zeros((2, 2, 2), np.uint8), "y: expected .* even", id="odd width"),
        pytest.param(np.zeros((0, 4), np.uint8), np.zeros((0, 2, 2), np.uint8), "y: expected .* even", id="no rows"),
        pytest.param(
            np.zeros((4, 4, 1), np.uint8), np.zeros((2, 2, 2), np.uint8), r"y: .*\(4, 4, 1\)", id="y of 3 axes"
        ),
        pytest.param(np.zeros((4, 4), np.int8), np.zeros((2, 2, 2), np.uint8), "y: .* int8", id="y dtype"),
        pytest.param(np.zeros((4, 4), np.uint8), np.zeros((2, 4), np.uint8), r"uv: expected \(2, 2, 2\)", id="flat uv"),
        pytest.param(
            np.zeros((4, 6), np.uint8), np.zeros((2, 2, 2), np.uint8), r"uv: expected \(2, 3, 2\)", id="narrow"
        ),
        pytest.param(np.zeros((4, 4), np.uint8), np.zeros((2, 2, 2), np.int16), "uv: .* int16", id="uv dtype"),
    ],
)
def test_refuses_planes_that_are_not_of_one_frame(y, uv, message):
    with pytest.raises(ShapeError, match=message):
        nv12_to_rgb(y, uv)


def test_refuses_an_unknown_matrix():
    with pytest.raises(OptionError, match="expected one of bt601, bt709, got 'bt2020'"):
        nv12_to_rgb(*flat(0, 0, 0), matrix="bt2020")
