"""A data set's segmentations become the masks that pycocotools makes of them, and bad ones are told before that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visionfast.postprocess.masks import InstanceMasks
from visionfast.verify_segments import check_segmentation, segmentation_rle, segmentation_size

HW = (30, 40)


def _as_pycocotools(segmentation: Any) -> InstanceMasks:
    from pycocotools.coco import COCO

    coco = COCO()
    coco.imgs = {1: {"height": HW[0], "width": HW[1]}}
    rle = coco.annToRLE({"image_id": 1, "segmentation": segmentation})
    counts = rle["counts"]
    return InstanceMasks((counts.encode() if isinstance(counts, str) else counts,), HW)


@pytest.mark.parametrize(
    "segmentation",
    [
        [[3, 4, 20, 4, 20.5, 19.25, 3, 18]],
        [[3, 4, 20, 4, 20, 18], [25, 20, 39, 20, 39, 29, 25, 29]],  # in two parts
        [[-5, -5, 60, -5, 60, 50, -5, 50]],  # further than the image
        [[5, 5, 5, 5, 5, 5]],  # no area
        {"size": [30, 40], "counts": [100, 50, 1050]},
        {"size": [30, 40], "counts": [0, 1200]},
        {"size": [30, 40], "counts": [1200]},
    ],
)
def test_the_mask(segmentation: Any) -> None:
    assert check_segmentation(segmentation) == ""
    rle = segmentation_rle(segmentation, HW)
    assert rle["size"] == list(HW)
    assert (InstanceMasks((rle["counts"],), HW).dense() == _as_pycocotools(segmentation).dense()).all()
    assert segmentation_size(segmentation) == (HW if isinstance(segmentation, dict) else None)


@given(seed=st.integers(0, 2**32 - 1), height=st.integers(1, 9), width=st.integers(1, 9))
def test_compressed_run_lengths_stay_as_they_are(seed: int, height: int, width: int) -> None:
    plane = np.random.default_rng(seed).random((1, height, width)) < 0.5
    (rle,) = InstanceMasks.from_dense(plane).rle()
    assert check_segmentation(rle) == ""
    assert segmentation_rle(rle, (height, width)) == {"size": [height, width], "counts": rle["counts"].encode()}


@given(
    counts=st.text(st.characters(min_codepoint=32, max_codepoint=127), max_size=20)
    | st.text(st.characters(min_codepoint=48, max_codepoint=111), min_size=1, max_size=20)
)
def test_text_that_is_no_run_lengths_is_told(counts: str) -> None:
    """Whatever stands there: none is let through whose runs do not fill the image exactly."""
    if check_segmentation({"size": [3, 4], "counts": counts}) == "":
        mask = InstanceMasks((segmentation_rle({"size": [3, 4], "counts": counts}, (3, 4))["counts"],), (3, 4))
        assert mask.dense().shape == (1, 3, 4)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=7)))
def test_anything_else_is_told(value: Any) -> None:
    check_segmentation(value)
    check_segmentation({"size": value, "counts": value})
    check_segmentation({"size": [3, 4], "counts": value})
