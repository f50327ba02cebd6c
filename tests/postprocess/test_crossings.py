"""Masks read off the crossings of their enlarged logits, against the definition that enlarges every pixel."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_images import placed_in

from visionfast.postprocess import crossings
from visionfast.postprocess.crossings import enlarged_pixels, enlarged_runs
from visionfast.postprocess.enlarge import Resize, enlarge_reference
from visionfast.postprocess.masks import InstanceMasks, counts_from_runs
from visionfast.types import Letterbox

# A pixel may fall on either side where its logit is this near to the threshold, relative to what it is made of: the
# enlarged absolute values. float32 rounds at 6e-8 of those, a few times.
ROUNDING = 5e-7

RESIZES = st.sampled_from(["letterbox", "longest-side", "stretch"])
IMAGES_HW = st.tuples(st.integers(1, 90), st.integers(1, 90)) | st.sampled_from(
    [(1, 1), (1, 400), (400, 1), (2, 2), (16, 16), (48, 48), (64, 64), (128, 128), (63, 65), (300, 5), (2, 800)]
)


def _dense(runs: np.ndarray, image_hw: tuple[int, int]) -> np.ndarray:
    return InstanceMasks((counts_from_runs(*runs, image_hw),), image_hw).dense()[0]


def _check(logits: np.ndarray, placed: Letterbox, resize: Resize, threshold: float) -> None:
    """Runs and counts are the definition's, wherever rounding does not decide."""
    enlarged = enlarge_reference(logits[None], placed, resize)[0]
    doubt = ROUNDING * enlarge_reference(np.abs(logits)[None], placed, resize)[0]
    undecided = np.abs(enlarged - np.float32(threshold)) <= doubt
    runs = enlarged_runs(logits, placed, resize, threshold)
    dense = _dense(runs, placed.image_hw)
    np.testing.assert_array_equal(dense[~undecided], (enlarged > threshold)[~undecided])
    assert (runs[0] < runs[1]).all()
    assert (runs[1, :-1] <= runs[0, 1:]).all()
    assert InstanceMasks.from_dense(dense[None]).counts[0] == counts_from_runs(*runs, placed.image_hw)
    higher = enlarged_runs(logits, placed, resize, threshold + 1)
    areas = [int((end - start).sum()) for start, end in (higher, runs)]
    assert enlarged_pixels(logits, placed, resize, (threshold + 1, threshold)) == areas


@given(
    image_hw=IMAGES_HW,
    plane=st.sampled_from([3, 16, 17, 64]),
    resize=RESIZES,
    kind=st.sampled_from(["noise", "few levels", "blob", "point", "spoilt"]),
    threshold=st.sampled_from([0.0, 1.0, -1.0, 0.05, -40.0]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=400, deadline=None)
def test_runs_are_the_definitions(
    image_hw: tuple[int, int], plane: int, resize: Resize, kind: str, threshold: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (plane, plane)).astype(np.float32)
    if kind == "few levels":  # ties with the threshold
        logits = np.rint(logits / 3)
    elif kind == "blob":
        y, x = np.mgrid[0:plane, 0:plane] / plane - rng.random((2, 1, 1))
        logits = (20 * np.exp(-20 * (x * x + y * y)) - 6 + 0.1 * logits).astype(np.float32)
    elif kind == "point":
        logits[:] = -3
        logits[tuple(rng.integers(0, plane, 2))] = 30
    elif kind == "spoilt":
        logits[rng.random(logits.shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf, 1e12, -1e12])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossings, "_STRIP_VALUES", int(rng.integers(1, 5000)))  # many strips
        _check(logits, placed_in(64, image_hw, resize), resize, threshold)


@given(
    factor=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
    threshold=st.sampled_from([0.0, 1.0, -2.0]),
)
@settings(max_examples=60, deadline=None)
def test_ties_are_outside(factor: int, seed: int, threshold: float) -> None:
    # Whole logits enlarged by a power of two: every weight and sum is exact, so no pixel is in doubt.
    logits = np.random.default_rng(seed).integers(-2, 3, (16, 16)).astype(np.float32)
    image_hw = (16 * factor, 16 * factor)
    placed = Letterbox(image_hw, (64, 64), (64, 64), 0, 0, 1.0)
    dense = _dense(enlarged_runs(logits, placed, "stretch", threshold), image_hw)
    np.testing.assert_array_equal(dense, enlarge_reference(logits[None], placed, "stretch")[0] > threshold)


@pytest.mark.parametrize("resize", ["letterbox", "longest-side", "stretch"])
@pytest.mark.parametrize("image_hw", [(1, 1), (7, 5), (64, 64), (300, 20)])
def test_all_or_nothing(image_hw: tuple[int, int], resize: Resize) -> None:
    placed, pixels = placed_in(64, image_hw, resize), image_hw[0] * image_hw[1]
    for value, count in ((1, pixels), (0, 0), (-1, 0), (np.nan, 0), (np.inf, pixels), (-np.inf, 0)):
        plane = np.full((16, 16), value, np.float32)
        assert _dense(enlarged_runs(plane, placed, resize), image_hw).sum() == count
        assert enlarged_pixels(plane, placed, resize, (0.0, 0.5)) == [count, count]


def test_a_mask_in_the_padding_alone_is_empty() -> None:
    placed = placed_in(64, (20, 64), "longest-side")  # rows 20 to 63 of the input are padding
    plane = np.full((16, 16), -1, np.float32)
    plane[8:] = 1
    assert enlarged_runs(plane, placed, "longest-side").shape == (2, 0)
    assert enlarged_runs(plane, placed, "stretch").shape[1] > 0


@pytest.mark.parametrize("resize", ["longest-side", "stretch"])
@pytest.mark.parametrize("image_hw", [(480, 640), (1080, 1920), (1999, 1333)])
def test_photographs_sizes(image_hw: tuple[int, int], resize: Resize) -> None:
    y, x = np.mgrid[0:256, 0:256] / 256
    noise = np.random.default_rng(0).normal(0, 0.3, (256, 256))
    logits = (6 * np.sin(5 * x + 1) * np.sin(4 * y + 0.5) + noise).astype(np.float32)
    for threshold in (0.0, 1.0, -1.0):
        _check(logits, placed_in(1024, image_hw, resize), resize, threshold)


@pytest.mark.parametrize("resize", ["longest-side", "stretch"])
def test_memory_of_a_very_large_image(resize: Resize) -> None:
    # Smooth, as a network's masks are: the runs themselves are part of the answer. 64 MP: one float32 plane is 244 MiB.
    y, x = np.mgrid[0:256, 0:256] / 256
    logits = (6 * np.sin(5 * x + 1) * np.sin(4 * y + 0.5)).astype(np.float32)
    placed = placed_in(1024, (8000, 8000), resize)
    tracemalloc.start()
    try:
        runs = enlarged_runs(logits, placed, resize)
        inside, outside = enlarged_pixels(logits, placed, resize, (1.0, -1.0))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    area = int((runs[1] - runs[0]).sum())
    assert 0 < inside < area < outside < 8000 * 8000
    assert peak_bytes < 8 << 20


def test_threads_share_nothing() -> None:
    rng = np.random.default_rng(0)
    cases = [
        (rng.normal(0, 3, (64, 64)).astype(np.float32), placed_in(64, (90 + i, 120 - i), resize), resize)
        for i in range(12)  # more geometries than are kept
        for resize in ("longest-side", "stretch")
    ]
    alone = [enlarged_runs(*case) for case in cases]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda i: enlarged_runs(*cases[i % len(cases)]), range(20 * len(cases))))
    for i, runs in enumerate(together):
        np.testing.assert_array_equal(runs, alone[i % len(cases)])
