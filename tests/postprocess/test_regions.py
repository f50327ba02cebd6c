"""Holes and specks, removed as the generator does that SAM's publishers give with it."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from visionfast.postprocess.regions import remove_small_regions


@pytest.fixture(scope="module")
def amg() -> Any:
    """The publishers' own functions."""
    return pytest.importorskip("segment_anything.utils.amg", reason="pip install segment-anything")


def _blobs(hw: tuple[int, int], share: float, coarse: float, seed: int) -> npt.NDArray[np.bool_]:
    noise = np.random.default_rng(seed).random(hw)
    smooth = cv2.GaussianBlur(noise, (0, 0), coarse) if coarse else noise
    inside: npt.NDArray[np.bool_] = smooth <= np.quantile(smooth, share)
    return inside


@given(
    hw=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    part=st.tuples(*[st.floats(0, 1)] * 4),
    share=st.floats(0, 1),
    coarse=st.sampled_from([0, 1, 3]),
    min_area=st.integers(1, 200),
    seed=st.integers(0, 99),
)
@example(hw=(1, 1), part=(0, 1, 0, 1), share=1, coarse=0, min_area=1, seed=0)
@example(hw=(1, 50), part=(0, 1, 0, 1), share=0.5, coarse=0, min_area=3, seed=0)
@example(hw=(50, 1), part=(0, 1, 0, 1), share=0.5, coarse=0, min_area=3, seed=0)
@example(hw=(50, 60), part=(0.4, 0.5, 0, 1), share=0.9, coarse=1, min_area=200, seed=0)  # a band: two sides apart
@example(hw=(8, 9), part=(0.4, 0.5, 0.4, 0.5), share=1, coarse=0, min_area=200, seed=0)  # all around is a small hole
@settings(deadline=None, max_examples=300)
def test_it_is_holes_and_then_islands(
    amg: Any,
    hw: tuple[int, int],
    part: tuple[float, float, float, float],
    share: float,
    coarse: float,
    min_area: int,
    seed: int,
) -> None:
    top, bottom, left, right = (round(at * side) for at, side in zip(part, (hw[0], hw[0], hw[1], hw[1]), strict=True))
    mask = np.zeros(hw, bool)
    mask[top:bottom, left:right] = _blobs(hw, share, coarse, seed)[top:bottom, left:right]
    filled, changed = amg.remove_small_regions(mask, min_area, mode="holes")
    expected, changed_again = amg.remove_small_regions(filled, min_area, mode="islands")
    before = mask.copy()
    repaired = remove_small_regions(mask, min_area)
    np.testing.assert_array_equal(mask, before)
    assert (repaired is None) == (not changed and not changed_again)
    np.testing.assert_array_equal(mask if repaired is None else repaired, expected)


def test_small_ones_go_and_those_of_min_area_stay() -> None:
    mask = np.zeros((20, 20), bool)
    mask[2:10, 2:10] = True  # 64 pixels
    mask[4:6, 4:6] = False  # a hole of 4
    mask[15, 15:18] = True  # a speck of 3
    assert remove_small_regions(mask, 3) is None
    repaired = remove_small_regions(mask, 4)
    assert repaired is not None
    assert (repaired[4, 4], repaired[15, 15]) == (False, False)
    repaired = remove_small_regions(mask, 5)
    assert repaired is not None
    np.testing.assert_array_equal(np.argwhere(repaired)[[0, -1]], [[2, 2], [9, 9]])
    assert repaired.sum() == 64


def test_of_a_mask_of_specks_the_largest_stays() -> None:
    mask = np.zeros((20, 20), bool)
    mask[2, 2], mask[8, 8:11], mask[15, 3:5] = True, True, True
    repaired = remove_small_regions(mask, 100)
    assert repaired is not None
    assert np.argwhere(repaired).tolist() == [[8, 8], [8, 9], [8, 10]]


@pytest.mark.parametrize("value", [False, True])
def test_a_plane_all_of_one_kind_needs_no_repair(value: bool) -> None:
    assert remove_small_regions(np.full((20, 20), value), 100) is None
