"""Enlarging mask logits: the definition against the official predictors, and its taps against the definition."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_images import placed_in

from visionfast.errors import ShapeError
from visionfast.postprocess.enlarge import Resize, enlarge_reference, enlarge_taps
from visionfast.types import Letterbox

IMAGES_HW = [(480, 640), (1080, 810), (720, 1280), (1024, 1024), (256, 256), (333, 1500), (1, 1), (2, 700), (1999, 7)]


def _logits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 5, shape).astype(np.float32)


# ---- the definition ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("image_hw", IMAGES_HW)
def test_definition_is_that_of_sam(image_hw: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("segment_anything.modeling")
    placed, logits = placed_in(1024, image_hw, "longest-side"), _logits(0, 2, 256, 256)
    sam = SimpleNamespace(image_encoder=SimpleNamespace(img_size=1024))
    theirs = modeling.Sam.postprocess_masks(sam, torch.from_numpy(logits)[None], placed.resized_hw, image_hw)[0]
    ours = enlarge_reference(logits, placed, "longest-side")
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=5e-7 * np.abs(logits).max())


@pytest.mark.parametrize("image_hw", IMAGES_HW)
def test_definition_is_that_of_sam_2(image_hw: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    transforms = pytest.importorskip("sam2.utils.transforms")
    logits = _logits(0, 2, 256, 256)
    no_regions = SimpleNamespace(mask_threshold=0.0, max_hole_area=0.0, max_sprinkle_area=0.0)
    theirs = transforms.SAM2Transforms.postprocess_masks(no_regions, torch.from_numpy(logits)[None], image_hw)[0]
    ours = enlarge_reference(logits, placed_in(1024, image_hw, "stretch"), "stretch")
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=5e-7 * np.abs(logits).max())


@given(length=st.integers(1, 9000), source=st.integers(3, 1024))
@settings(max_examples=100, deadline=None)
def test_weights_are_those_of_torch_to_the_bit(length: int, source: int) -> None:
    torch = pytest.importorskip("torch")
    placed = Letterbox((length, 1), (1024, 1024), (1024, 1024), 0, 0, 1.0)
    rows, _ = enlarge_taps((source, 3), placed, "stretch")
    ramp = torch.arange(source, dtype=torch.float32)
    # Every third pixel is 1, from each of three offsets: a row's two weights come out apart from one another.
    combs = torch.stack([(ramp % 3 == offset).float() for offset in range(3)])[None]  # (1, 3, source)
    theirs = torch.nn.functional.interpolate(combs, length, mode="linear", align_corners=False)[0].numpy()
    for k in (0, 1):
        np.testing.assert_array_equal(rows.weight[:, k], theirs[(rows.first + k) % 3, np.arange(length)])


def test_a_square_image_does_not_say_how_it_came() -> None:
    longest, stretched = (placed_in(1024, (300, 300), resize) for resize in ("longest-side", "stretch"))
    assert longest == stretched
    logits = _logits(0, 1, 256, 256)
    by_input, at_once = (enlarge_reference(logits, longest, resize) for resize in ("longest-side", "stretch"))
    assert np.abs(by_input - at_once).max() > 1


@pytest.mark.parametrize("resize", ["letterbox", "longest-side", "stretch"])
def test_no_masks_and_equal_logits(resize: Resize) -> None:
    placed = placed_in(64, (30, 47), resize)
    assert enlarge_reference(np.zeros((0, 16, 16), np.float32), placed, resize).shape == (0, 30, 47)
    level = enlarge_reference(np.full((2, 16, 16), 3, np.float32), placed, resize)
    np.testing.assert_allclose(level, np.full((2, 30, 47), 3), rtol=2e-7)


@pytest.mark.parametrize("resize", ["letterbox", "longest-side", "stretch"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float32(3e38)])
def test_what_is_not_finite_reaches_as_far_as_its_weight(resize: Resize, value: float) -> None:
    placed, logits = placed_in(64, (40, 64), resize), _logits(0, 1, 16, 16)
    spoilt = logits.copy()
    spoilt[0, 7, 8] = value
    touched = enlarge_reference(np.eye(256, dtype=np.float32)[None, 7 * 16 + 8].reshape(1, 16, 16), placed, resize) > 0
    before, after = (enlarge_reference(planes, placed, resize) for planes in (logits, spoilt))
    assert 0 < touched.sum() < touched.size
    np.testing.assert_array_equal(after[~touched], before[~touched])
    assert np.isfinite(after).all()
    assert ((after[touched] > 0) == (value > 0)).all()  # NaN is outside


def test_shape_errors() -> None:
    placed = placed_in(64, (30, 40), "longest-side")
    for plane_hw in ((2, 16), (16, 65), (16, 0)):
        with pytest.raises(ShapeError, match="logits: expected 3 to 64"):
            enlarge_reference(np.zeros((1, *plane_hw), np.float32), placed, "longest-side")
        with pytest.raises(ShapeError, match="logits: expected 3 to 64"):
            enlarge_taps(plane_hw, placed, "longest-side")


# ---- taps --------------------------------------------------------------------------------------------------


@given(
    image_hw=st.tuples(st.integers(1, 90), st.integers(1, 90))
    | st.sampled_from([(1, 1), (1, 400), (400, 1), (64, 64)]),
    plane=st.sampled_from([3, 16, 21, 64]),
    resize=st.sampled_from(["letterbox", "longest-side", "stretch"]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_taps_are_the_definition(image_hw: tuple[int, int], plane: int, resize: Resize, seed: int) -> None:
    placed, logits = placed_in(64, image_hw, resize), _logits(seed, 1, plane, plane)
    rows, columns = enlarge_taps((plane, plane), placed, resize)
    for taps, length in zip((rows, columns), image_hw, strict=True):
        assert (taps.first.dtype, taps.weight.dtype) == (np.int32, np.float32)
        assert taps.first.shape == (length,)
        assert taps.weight.shape == (length, 2 if resize == "stretch" else 3)
        assert taps.first.min() >= 0
        assert taps.first.max() + taps.weight.shape[1] <= plane
        assert (np.diff(taps.first) >= 0).all()
        assert taps.weight.min() >= 0
        np.testing.assert_allclose(taps.weight.sum(axis=1, dtype=np.float64), 1, atol=2e-7)
    enlarged = np.zeros(image_hw)
    for i in range(rows.weight.shape[1]):
        for j in range(columns.weight.shape[1]):
            weight = rows.weight[:, i, None].astype(np.float64) * columns.weight[:, j]
            enlarged += weight * logits[0][rows.first[:, None] + i, columns.first + j]
    definition = enlarge_reference(logits, placed, resize)[0]
    np.testing.assert_allclose(enlarged, definition, rtol=0, atol=2e-7 * np.abs(logits).max())
