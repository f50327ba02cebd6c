"""The crops, grids and boxes of everything mode, against the generator that SAM's publishers give with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from visionfast.crops import Crop, crops_of, near_crop_edge, point_grid, uncrop
from visionfast.postprocess.masks import InstanceMasks


@pytest.fixture(scope="module")
def amg() -> Any:
    """The publishers' own functions."""
    return pytest.importorskip("segment_anything.utils.amg", reason="pip install segment-anything")


@given(height=st.integers(16, 3000), width=st.integers(16, 3000), layers=st.integers(0, 3), overlap=st.floats(0, 0.9))
@example(height=16, width=3000, layers=3, overlap=0.0)
@example(height=17, width=17, layers=3, overlap=0.9)
@example(height=1080, width=810, layers=1, overlap=512 / 1500)
@settings(deadline=None)
def test_the_crops_are_the_official_ones(amg: Any, height: int, width: int, layers: int, overlap: float) -> None:
    boxes, of_layer = amg.generate_crop_boxes((height, width), layers, overlap)
    expected = [
        Crop(*box, layer)
        for box, layer in zip(boxes, of_layer, strict=True)
        if box[0] < box[2] and box[1] < box[3]  # it makes empty ones, and then fails on them
    ]
    assert crops_of((height, width), layers, overlap) == expected


@given(height=st.integers(1, 40), width=st.integers(1, 40), layers=st.integers(0, 3), overlap=st.floats(0, 0.99))
@example(height=1, width=1, layers=3, overlap=0.3)
@example(height=1, width=40, layers=2, overlap=0.0)
def test_crops_cover_the_image_and_are_never_empty(height: int, width: int, layers: int, overlap: float) -> None:
    crops = crops_of((height, width), layers, overlap)
    assert crops[0] == Crop(0, 0, width, height, 0)
    for layer in range(layers + 1):
        covered = np.zeros((height, width), bool)
        for crop in (c for c in crops if c.layer == layer):
            assert 0 <= crop.left < crop.right <= width
            assert 0 <= crop.top < crop.bottom <= height
            assert crop.area == crop.hw[0] * crop.hw[1] > 0
            covered[crop.top : crop.bottom, crop.left : crop.right] = True
        assert covered.all()


@pytest.mark.parametrize("points_per_side", [1, 2, 7, 32])
@pytest.mark.parametrize("hw", [(1, 1), (1, 5000), (1080, 810)])
def test_the_grid_is_the_official_one_and_inside(amg: Any, points_per_side: int, hw: tuple[int, int]) -> None:
    points = point_grid(points_per_side, hw)
    np.testing.assert_array_equal(points, amg.build_point_grid(points_per_side) * np.array(hw)[None, ::-1])
    assert ((points > 0) & (points < hw[::-1])).all()


_IMAGE_HW = (120, 160)
_CROPS = crops_of(_IMAGE_HW, 2, 0.3)


@given(crop=st.sampled_from(_CROPS), data=st.data())
@settings(deadline=None)
def test_boxes_near_a_crops_edge_are_the_official_ones(amg: Any, crop: Crop, data: st.DataObject) -> None:
    import torch

    x, y = st.integers(0, crop.hw[1] - 1), st.integers(0, crop.hw[0] - 1)
    boxes = data.draw(st.lists(st.tuples(x, y, x, y), max_size=12))
    xyxy = np.array(boxes, np.float32).reshape(-1, 4)
    expected = amg.is_box_near_crop_edge(
        torch.from_numpy(xyxy), [crop.left, crop.top, crop.right, crop.bottom], [0, 0, *_IMAGE_HW[::-1]]
    )
    np.testing.assert_array_equal(near_crop_edge(xyxy, crop, _IMAGE_HW), expected.numpy())


def test_near_an_edge_is_up_to_twenty_pixels() -> None:
    crop = Crop(40, 0, 140, 120, 1)
    right = np.array([[30, 30, right, 60] for right in (78, 79, 80, 99)], np.float32)  # 22, 21, 20 and 1 from its edge
    assert near_crop_edge(right, crop, (120, 400)).tolist() == [False, False, True, True]
    assert not near_crop_edge(right, crop, (120, 140)).any()  # the same edge, now the image's


def _masks(hw: tuple[int, int], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """(6, H, W): empty, full, one column, the last pixel, noise, and full-height columns."""
    masks = np.zeros((6, *hw), bool)
    masks[1] = True
    masks[2, :, rng.integers(hw[1])] = True
    masks[3, -1, -1] = True
    masks[4] = rng.random(hw) < 0.5
    masks[5] = rng.random(hw[1]) < 0.6
    return masks


@given(crop=st.sampled_from(_CROPS), seed=st.integers(0, 99))
@example(crop=Crop(0, 0, 160, 120, 0), seed=0)
@example(crop=Crop(3, 0, 9, 120, 1), seed=0)  # as high as the image: its columns follow one another there too
@example(crop=Crop(0, 3, 160, 4, 1), seed=0)
@example(crop=Crop(159, 119, 160, 120, 1), seed=0)
def test_uncropped_masks_are_the_planes_put_in_place(crop: Crop, seed: int) -> None:
    dense = _masks(crop.hw, np.random.default_rng(seed))
    placed = np.zeros((len(dense), *_IMAGE_HW), bool)
    placed[:, crop.top : crop.bottom, crop.left : crop.right] = dense
    assert uncrop(InstanceMasks.from_dense(dense), crop, _IMAGE_HW) == InstanceMasks.from_dense(placed)


def test_no_masks_are_uncropped_to_none() -> None:
    assert uncrop(InstanceMasks((), (10, 10)), Crop(5, 5, 15, 15, 1), (40, 40)) == InstanceMasks((), (40, 40))
