"""Which of a prompt's masks answer it, against sam2's own decoder."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.postprocess.choose import choose_masks, given_logits
from visionfast.postprocess.decoded import HostDecoded
from visionfast.types import PromptSpec

SAM = PromptSpec(box_first=False, pad_with_box=False)
SAM_2 = PromptSpec(box_first=True, pad_with_box=True, stability=(0.05, 0.98), logit_limit=32.0)


def _decoded(logits: np.ndarray, scores: np.ndarray) -> HostDecoded:
    return HostDecoded(logits.astype(np.float32), scores.astype(np.float32), "stretch")


@given(
    prompts=st.integers(1, 4),
    scores_from=st.sampled_from([[0.1, 0.5, 0.9], [0.5], [0.5, np.nan], [-np.inf, np.inf, 0.5]]),
    level=st.sampled_from([-9.0, -0.05, 0.0, 0.05, 9.0]),
    noise=st.sampled_from([0.0, 0.03, 0.3, 10.0]),
    spoilt=st.sampled_from([0.0, 0.02, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_single_masks_are_those_of_sam_2(
    prompts: int, scores_from: list[float], level: float, noise: float, spoilt: float, seed: int
) -> None:
    torch = pytest.importorskip("torch")
    decoder = pytest.importorskip("sam2.modeling.sam.mask_decoder").MaskDecoder
    rng = np.random.default_rng(seed)
    logits = (level + noise * rng.normal(size=(prompts, 4, 10, 10))).astype(np.float32)
    logits[rng.random(logits.shape) < spoilt] = np.nan
    logits[:, :, 0, 0] = np.arange(4 * prompts).reshape(prompts, 4)  # which mask it is
    scores = rng.choice(np.array(scores_from, np.float32), (prompts, 4))

    at = SimpleNamespace(dynamic_multimask_stability_delta=0.05, dynamic_multimask_stability_thresh=0.98)
    at._get_stability_scores = lambda masks: decoder._get_stability_scores(at, masks)
    theirs, their_scores = decoder._dynamic_multimask_via_stability(at, *map(torch.from_numpy, (logits, scores)))
    ours = choose_masks(_decoded(logits, scores), SAM_2, multimask=False)
    assert ours.shape == (prompts, 1)
    np.testing.assert_array_equal(ours, theirs[:, :, 0, 0].numpy().astype(np.int64))
    np.testing.assert_array_equal(scores.reshape(-1)[ours], their_scores.numpy())


@pytest.mark.parametrize(("least", "of"), [(0.98, 50), (0.95, 20)])
def test_stable_at_the_threshold_and_just_below(least: float, of: int) -> None:
    # One pixel of so many is above -0.05 alone: the threshold, where both are float32 (0.95 in float64 is above it).
    spec = PromptSpec(box_first=True, pad_with_box=True, stability=(0.05, least))
    logits, scores = np.full((2, 4, 100), -1.0), np.array([[0.0, 0.2, 0.8, 0.8]] * 2)
    logits[:, 0, :of] = 1
    logits[0, 0, :1], logits[1, 0, :2] = 0, 0
    assert choose_masks(_decoded(logits.reshape(2, 4, 10, 10), scores), spec, multimask=False).tolist() == [[0], [6]]


@pytest.mark.parametrize("spec", [SAM, SAM_2])
def test_all_three_of_a_prompt_that_is_not_clear(spec: PromptSpec) -> None:
    decoded = _decoded(np.zeros((2, 4, 8, 8)), np.zeros((2, 4)))
    chosen = choose_masks(decoded, spec, multimask=True)
    assert chosen.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert chosen.dtype == np.int64


def test_sam_answers_with_the_first() -> None:
    decoded = _decoded(np.random.default_rng(0).normal(size=(3, 4, 8, 8)), np.array([[0, 1, 2, 3]] * 3))
    assert choose_masks(decoded, SAM, multimask=False).tolist() == [[0], [4], [8]]


@pytest.mark.parametrize("spec", [SAM, SAM_2])
def test_no_prompts(spec: PromptSpec) -> None:
    decoded = _decoded(np.zeros((0, 4, 8, 8)), np.zeros((0, 4)))
    assert choose_masks(decoded, spec, multimask=True).shape == (0, 3)
    assert choose_masks(decoded, spec, multimask=False).shape == (0, 1)


def test_given_logits() -> None:
    logits = np.array([[-99, -32, 0, 31.5, 99, np.inf, np.nan]], np.float32)
    assert given_logits(logits, SAM) is logits
    limited = given_logits(logits, SAM_2)
    assert limited.dtype == np.float32
    np.testing.assert_array_equal(limited, np.float32([[-32, -32, 0, 31.5, 32, 32, np.nan]]))
    assert logits[0, 0] == -99
