"""What is read off a decoder's answer in host memory, against the official implementations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from placed_images import placed_in

from visionfast.errors import ShapeError
from visionfast.postprocess.decoded import HostDecoded
from visionfast.postprocess.enlarge import Resize, enlarge_reference
from visionfast.postprocess.masks import InstanceMasks

if TYPE_CHECKING:
    from visionfast.sessions.prompts import Decoded

PLACED = {resize: placed_in(64, (60, 100), resize) for resize in ("longest-side", "stretch")}
NONE = np.zeros(0, np.int64)


@pytest.fixture(params=["longest-side", "stretch"])
def resize(request: pytest.FixtureRequest) -> Resize:
    return request.param


@pytest.fixture
def logits() -> np.ndarray:
    """(3, 4, 16, 16): noise, but for two masks that are nowhere and everywhere above ±1."""
    logits = np.random.default_rng(0).normal(0, 2, (3, 4, 16, 16)).astype(np.float32)
    logits[0, 1], logits[2, 2] = -5, 5
    return logits


def _decoded(logits: np.ndarray, resize: Resize) -> Decoded:
    scores = np.random.default_rng(1).random(logits.shape[:2], np.float32)
    return HostDecoded(logits, scores, resize)


def test_masks_are_numbered_prompt_by_prompt(logits: np.ndarray, resize: Resize) -> None:
    decoded, placed = _decoded(logits, resize), PLACED[resize]
    chosen = np.array([10, 1, 0, 10])
    planes = np.stack([logits[2, 2], logits[0, 1], logits[0, 0], logits[2, 2]])
    np.testing.assert_array_equal(decoded.logits(chosen), planes)
    masks = decoded.masks(chosen, placed)
    assert masks.image_hw == (60, 100)
    assert masks == InstanceMasks.from_dense(enlarge_reference(planes, placed, resize) > 0)


def test_logits_are_a_copy(logits: np.ndarray, resize: Resize) -> None:
    decoded, before = _decoded(logits, resize), logits.copy()
    decoded.logits(np.arange(12))[:] = 7
    np.testing.assert_array_equal(logits, before)


def test_stability_of_enlarged_logits_is_the_generators(logits: np.ndarray, resize: Resize) -> None:
    torch = pytest.importorskip("torch")
    amg = pytest.importorskip("segment_anything.utils.amg")
    enlarged = torch.from_numpy(enlarge_reference(logits.reshape(-1, 16, 16), PLACED[resize], resize))
    theirs = amg.calculate_stability_score(enlarged, 0.0, 1.0).numpy()
    ours = _decoded(logits, resize).stability(np.arange(12), 1.0, PLACED[resize])
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)  # NaN where nothing is above -1
    assert np.isnan(ours[1])
    assert ours[10] == 1


def test_stability_of_logits_is_sam_2s(logits: np.ndarray, resize: Resize) -> None:
    torch = pytest.importorskip("torch")
    decoder = pytest.importorskip("sam2.modeling.sam.mask_decoder")
    at = SimpleNamespace(dynamic_multimask_stability_delta=0.05)
    theirs = decoder.MaskDecoder._get_stability_scores(at, torch.from_numpy(logits)).numpy().ravel()
    ours = _decoded(logits, resize).stability(np.arange(12), 0.05)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)
    assert ours[1] == 1  # nothing above -0.05


def test_nothing_chosen_and_no_prompts(logits: np.ndarray, resize: Resize) -> None:
    for decoded in (_decoded(logits, resize), _decoded(logits[:0], resize)):
        assert decoded.logits(NONE).shape == (0, 16, 16)
        assert decoded.masks(NONE, PLACED[resize]) == InstanceMasks((), (60, 100))
        assert decoded.stability(NONE, 1.0).shape == decoded.stability(NONE, 1.0, PLACED[resize]).shape == (0,)


def test_logits_that_are_not_finite(logits: np.ndarray, resize: Resize) -> None:
    logits[0, 0], logits[1, 1, 3:9, 3:9] = np.nan, np.nan
    decoded, chosen = _decoded(logits, resize), np.array([0, 5, 6])
    masks = decoded.masks(chosen, PLACED[resize])
    assert masks.area()[0] == 0
    assert masks.area()[1] > 0
    assert masks[[2]] == _decoded(logits[1:2], resize).masks(np.array([2]), PLACED[resize])  # its neighbour is unharmed
    assert decoded.stability(chosen, 1.0)[0] == 1
    assert np.isnan(decoded.stability(chosen, 1.0, PLACED[resize])[0])


def test_shape_errors(logits: np.ndarray) -> None:
    for planes, scores in ((logits, (3, 3)), (logits[0], (3, 4)), (logits.astype(np.float64), (3, 4))):
        with pytest.raises(ShapeError, match="logits, scores: expected"):
            HostDecoded(planes, np.zeros(scores, np.float32), "stretch")
