"""Average precision by hand, of samples in which images count several times, and the bootstrap's intervals."""

from __future__ import annotations

import numpy as np
import pytest
from coco_reference import CATEGORIES, Scene, coco_precisions, found, labelled, matched, random_scene, untied
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.verify_precision import average_precisions, bootstrap_differences


def by_hand(hits: list[bool], objects: int) -> float:
    """COCO's average precision of one class as a formula: at each recall the best precision from there on."""
    true = np.cumsum(hits)
    precision = true / np.arange(1, len(hits) + 1)
    recall = true / objects
    best = [max((p for p, r in zip(precision, recall, strict=True) if r >= level), default=0.0) for level in LEVELS]
    return float(np.mean(best))


LEVELS = np.linspace(0, 1, 101)


@pytest.mark.parametrize(
    "hits",
    [
        [True],
        [False],
        [True, False],
        [False, True],
        [True, True, False, False, True],
        [False, False, True, True, False],
    ],
)
@pytest.mark.parametrize("missed", [0, 1, 5])
def test_by_hand(hits: list[bool], missed: int) -> None:
    if missed == 0 and not any(hits):
        missed = 1
    things, boxes = [], []
    for i, hit in enumerate(hits):
        left = 20.0 * i
        boxes.append([left, 0, left + 10, 10])
        if hit:
            things.append(labelled((left, 0, 10, 10)))
    things += [labelled((20.0 * i, 100, 10, 10)) for i in range(missed)]
    scores = np.linspace(0.9, 0.1, len(hits))
    matches = matched([Scene(tuple(things), found(boxes, scores))])
    expected = by_hand(hits, sum(hits) + missed)
    assert average_precisions(matches)[0, :, 0] == pytest.approx([expected] * 10, abs=1e-12)
    if hits == [False, False, True, True, False] and missed == 0:
        assert expected == 0.5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_a_weight_is_so_many_copies_of_an_image(seed: int, counts: list[int]) -> None:
    """Weighted matches against pycocotools on a data set in which the images really are there that often."""
    rng = np.random.default_rng(seed)
    scenes = [untied(random_scene(rng, CATEGORIES, masks=False), rng) for _ in counts]
    copied = [scene for scene, count in zip(scenes, counts, strict=True) for _ in range(count)]
    weights = np.array([counts, [1] * len(counts)], np.int32)
    precisions = average_precisions(matched(scenes), weights=weights)
    expected = [
        coco_precisions(some, categories=CATEGORIES, kind="boxes")[0] if some else None for some in (copied, scenes)
    ]
    for got, wanted in zip(precisions, expected, strict=True):
        if wanted is None:
            assert np.isnan(got).all()
        else:
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


def _scenes(count: int, seed: int = 0) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [untied(random_scene(rng, CATEGORIES, masks=False), rng) for _ in range(count)]


def test_the_same_answers_never_differ() -> None:
    matches = matched(_scenes(12))
    differences = bootstrap_differences(matches, matches, resamples=50, seed=0)
    assert differences.shape == (50, 2)
    assert not differences.any()


def test_a_bootstrap_is_what_resampled_data_sets_give(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes, resamples = _scenes(6), 7
    worse = [Scene(scene.there, scene.found[1:]) for scene in scenes]
    first, second = matched(scenes), matched(worse)
    got = bootstrap_differences(first, second, resamples=resamples, seed=3)
    drawn = np.random.default_rng(3).multinomial(6, [1 / 6] * 6, size=resamples)
    for row, counts in zip(got, drawn, strict=True):
        pairs = []
        for some in (scenes, worse):
            copied = [scene for scene, count in zip(some, counts, strict=True) for _ in range(count)]
            precisions = average_precisions(matched(copied))[0]
            pairs.append((np.nanmean(precisions), np.nanmean(precisions[0])))
        assert row == pytest.approx(np.subtract(*pairs), abs=1e-12)
    # As many at a time as memory allows: how many that are makes no difference.
    monkeypatch.setattr("visionfast.verify_precision._CELLS", 20)
    assert np.array_equal(bootstrap_differences(first, second, resamples=resamples, seed=3), got)


def test_it_is_paired() -> None:
    """Half of the images are hard for both sides: each one's precision varies, their difference does not."""
    easy = Scene((labelled((10, 10, 40, 40)),), found([[10, 10, 50, 50]]))
    hard = Scene((labelled((10, 10, 40, 40)),), found([[200, 10, 240, 50]]))
    matches = matched([easy, hard] * 10)
    assert not bootstrap_differences(matches, matched([easy, hard] * 10), resamples=100, seed=1).any()
    alone = bootstrap_differences(matches, matched([Scene(hard.there, hard.found)] * 20), resamples=100, seed=1)
    assert alone[:, 0].std() > 0.05


def test_samples_without_an_object_are_no_number() -> None:
    there = Scene((labelled((10, 10, 40, 40)),), found([[10, 10, 50, 50]]))
    matches = matched([there, Scene((), found(np.zeros((0, 4))))])
    differences = bootstrap_differences(matches, matches, resamples=40, seed=0)
    assert 0 < np.isnan(differences[:, 0]).sum() < 40
