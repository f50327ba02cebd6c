"""Mask decoding against its definition, and its definition against ultralytics."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.errors import ShapeError
from visionfast.postprocess import prototypes as prototypes_module
from visionfast.postprocess.masks import InstanceMasks
from visionfast.postprocess.prototypes import decode_masks, mask_logits_reference, masks_reference
from visionfast.preprocess.reference import letterbox_geometry

SIZES_HW = st.sampled_from([(64, 64), (32, 64), (96, 32)])
IMAGES_HW = st.tuples(st.integers(1, 90), st.integers(1, 90)) | st.sampled_from(
    [(1, 1), (1, 200), (200, 1), (64, 64), (16, 16), (48, 63), (61, 64), (62, 64)]
)


def _boxes(rng: np.random.Generator, n: int, image_hw: tuple[int, int]) -> np.ndarray:
    """Anything from no area to the whole image, on pixel edges as often as not."""
    height, width = image_hw
    corners = rng.uniform(-0.2, 1.2, (n, 2, 2)) * (width, height)
    corners = np.clip(np.where(rng.random((n, 1, 1)) < 0.5, np.round(corners), corners), 0, (width, height))
    boxes = np.concatenate((corners.min(axis=1), corners.max(axis=1)), axis=1)
    boxes[rng.random(n) < 0.2] = (0, 0, width, height)
    return boxes.astype(np.float32)


@given(image_hw=IMAGES_HW, size_hw=SIZES_HW, half=st.booleans(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_fast_equals_definition(image_hw: tuple[int, int], size_hw: tuple[int, int], half: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    letterbox = letterbox_geometry(image_hw, size_hw)
    planes = rng.normal(0, 1, (4, size_hw[0] // 4, size_hw[1] // 4)).astype(np.float16 if half else np.float32)
    coefficients = rng.normal(0, 1, (5, 4)).astype(np.float32)
    xyxy = _boxes(rng, 5, image_hw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prototypes_module, "_STRIP_PIXELS", int(rng.integers(1, 3000)))  # many strips
        fast = decode_masks(planes, coefficients, xyxy, letterbox)
    expected = masks_reference(planes, coefficients, xyxy, letterbox)
    dense = fast.dense()
    # float32 against float64: only where the logit is 0 within rounding may a pixel differ.
    undecided = np.abs(mask_logits_reference(planes, coefficients, letterbox)) < 1e-5
    np.testing.assert_array_equal(dense[~undecided], expected[~undecided])
    assert InstanceMasks.from_dense(dense) == fast  # the runs are those that pycocotools writes


@pytest.mark.parametrize("image_hw", [(1, 1), (7, 5), (64, 64), (300, 20)])
def test_full_boxes_of_full_masks_are_one_run(image_hw: tuple[int, int]) -> None:
    letterbox = letterbox_geometry(image_hw, (64, 64))
    whole = np.array([[0, 0, image_hw[1], image_hw[0]]], np.float32)
    for sign in (1, -1):
        masks = decode_masks(np.ones((1, 16, 16), np.float32), np.float32([[sign]]), whole, letterbox)
        assert masks == InstanceMasks.from_dense(np.full((1, *image_hw), sign > 0))


def test_box_edges() -> None:
    # Pixel x is inside where x1 <= x < x2, as ultralytics crops.
    letterbox = letterbox_geometry((64, 64), (64, 64))
    planes, one = np.ones((1, 16, 16), np.float32), np.ones((1, 1), np.float32)
    for box, columns in (((2, 0, 5, 1), [2, 3, 4]), ((2.1, 0, 5.1, 1), [3, 4, 5]), ((63.5, 0, 64, 1), [])):
        mask = decode_masks(planes, one, np.array([box], np.float32), letterbox).dense()[0]
        assert np.flatnonzero(mask.any(axis=0)).tolist() == columns


def test_no_objects() -> None:
    letterbox = letterbox_geometry((30, 40), (64, 64))
    masks = decode_masks(
        np.ones((2, 16, 16), np.float32),
        np.zeros((0, 2), np.float32),
        np.zeros((0, 4), np.float32),
        letterbox,
    )
    assert masks == InstanceMasks((), (30, 40))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_numbers_that_are_not_finite_do_not_crash(value: float) -> None:
    letterbox = letterbox_geometry((30, 40), (64, 64))
    whole = np.array([[0, 0, 40, 30]] * 2, np.float32)
    planes = np.random.default_rng(0).normal(0, 1, (2, 16, 16)).astype(np.float32)
    masks = decode_masks(planes, np.array([[value, 1], [1, 0]], np.float32), whole, letterbox)
    healthy = decode_masks(planes, np.array([[1, 0]], np.float32), whole[:1], letterbox)
    assert masks[[1]] == healthy
    assert np.isfinite(value) or masks.area()[0] < 30 * 40


def test_coefficients_laid_out_by_anchor() -> None:
    letterbox = letterbox_geometry((30, 40), (64, 64))
    rng = np.random.default_rng(0)
    planes, rows = rng.normal(0, 1, (3, 16, 16)), rng.normal(0, 1, (3, 2)).astype(np.float32)
    planes = planes.astype(np.float32)
    whole = np.array([[0, 0, 40, 30]] * 2, np.float32)
    strided = np.asfortranarray(planes)
    assert decode_masks(strided, rows.T, whole, letterbox) == decode_masks(planes, rows.T.copy(), whole, letterbox)


def test_memory_does_not_grow_with_area_times_objects() -> None:
    letterbox = letterbox_geometry((3000, 4000), (640, 640))
    rng = np.random.default_rng(0)
    # Smooth planes, as a network's are: the runs themselves are part of the answer.
    y, x = np.mgrid[0:160, 0:160] / 160
    planes = np.stack([np.sin(7 * x + 3 * k * y + k) for k in range(4)]).astype(np.float32)
    prototypes_module._resampling.cache_clear()

    def peak_bytes(n: int) -> int:
        whole = np.tile(np.array([0, 0, 4000, 3000], np.float32), (n, 1))
        tracemalloc.start()
        try:
            masks = decode_masks(planes, rng.normal(0, 1, (n, 4)).astype(np.float32), whole, letterbox)
            assert masks.area().min() > 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak_bytes(3), peak_bytes(60)
    assert few < 48 << 20  # one dense float32 plane is 46 MiB; 300 of them are 13 GiB
    assert many < few + (4 << 20)


_ON_ONE_THREAD = """
import time
import numpy as np
from visionfast.postprocess.prototypes import decode_masks
from visionfast.preprocess.reference import letterbox_geometry

rng = np.random.default_rng(0)
planes, coefficients = rng.normal(0, 1, (32, 160, 160)).astype(np.float32), rng.normal(0, 1, (9, 32)).astype(np.float32)
letterbox = letterbox_geometry((1080, 810), (640, 640))
boxes = np.tile(np.array([100, 100, 700, 900], np.float32), (9, 1))
decode_masks(planes, coefficients, boxes, letterbox)
process, thread = time.process_time(), time.thread_time()
for count in (1, 2, 9):
    decode_masks(planes, coefficients[:count], boxes[:count], letterbox)
    time.sleep(0.05)  # in which the BLAS's threads would wait for more to do
print(time.process_time() - process, time.thread_time() - thread)
"""


def test_no_other_thread_works_or_waits_for_work() -> None:
    """It would have the next image's engine wait."""
    command = [sys.executable, "-c", _ON_ONE_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    process, thread = map(float, done.stdout.split())
    assert process < 1.2 * thread + 0.01  # processor time, not wall time: 7 times as much with OpenBLAS's threads


@pytest.mark.parametrize(
    ("size_hw", "image_hw"),
    [
        ((640, 640), (1080, 810)),  # no padding inside a prototype pixel
        ((640, 640), (720, 1280)),
        ((640, 640), (427, 640)),  # padding 106 + 107: enlarged 4 times
        ((640, 640), (638, 640)),  # padding 1 + 1
        ((640, 640), (636, 640)),  # padding 2 + 2: enlarged twice
        ((640, 640), (480, 637)),
        ((640, 640), (100, 1501)),
        ((640, 640), (160, 160)),
        ((384, 640), (500, 333)),
        ((640, 640), (3, 900)),
    ],
)
def test_definition_is_ultralytics(size_hw: tuple[int, int], image_hw: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("ultralytics.utils.ops")
    rng = np.random.default_rng(0)
    planes = rng.normal(0, 1, (32, size_hw[0] // 4, size_hw[1] // 4)).astype(np.float32)
    coefficients = rng.normal(0, 1, (6, 32)).astype(np.float32)
    xyxy = _boxes(rng, 6, image_hw)
    letterbox = letterbox_geometry(image_hw, size_hw)
    theirs = ops.process_mask_native(*map(torch.from_numpy, (planes, coefficients, xyxy)), image_hw).numpy()
    ours = masks_reference(planes, coefficients, xyxy, letterbox)
    fast = decode_masks(planes, coefficients, xyxy, letterbox).dense()
    # Logits are about 6 here, and torch finds its sampling positions in float32: only rounding is between us.
    undecided = np.abs(mask_logits_reference(planes, coefficients, letterbox)) < 2e-3
    assert undecided.mean() < 1e-3
    for masks in (ours, fast):
        np.testing.assert_array_equal(masks[~undecided], theirs.astype(bool)[~undecided])


def test_shape_errors() -> None:
    letterbox = letterbox_geometry((30, 40), (64, 64))
    boxes, weights = np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32)
    for planes in (np.zeros((4, 16, 16)), np.zeros((3, 16, 15)), np.zeros((3, 0, 0)), np.zeros((3, 32, 16))):
        with pytest.raises(ShapeError, match="prototypes"):
            decode_masks(planes.astype(np.float32), weights, boxes, letterbox)
    with pytest.raises(ShapeError, match="above 0"):
        decode_masks(np.zeros((0, 16, 16), np.float32), np.zeros((2, 0), np.float32), boxes, letterbox)
