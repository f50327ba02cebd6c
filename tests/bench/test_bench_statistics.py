"""Percentiles, intervals and ratios against their definitions, written out."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from visionfast.bench.records import Samples
from visionfast.bench.statistics import (
    block_counts,
    cell_means,
    interval_ranks,
    paired,
    percentile,
    rank,
    ratio,
    samples_needed,
    weighted_percentile,
)
from visionfast.errors import ShapeError

PERCENTS = (0.1, 25, 29, 50, 90, 95, 99, 99.9)
finite = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(values=st.lists(finite, min_size=1, max_size=60), percent=st.sampled_from(PERCENTS))
@example(values=[1.0] * 100, percent=29)  # 0.29 * 100 is below 29
@example(values=[float(i) for i in range(100)], percent=29)
def test_a_percentile_is_the_first_that_so_many_do_not_exceed(values: list[float], percent: float) -> None:
    exact = Fraction(str(percent)) / 100
    enough = [v for v in values if Fraction(sum(w <= v for w in values), len(values)) >= exact]
    found = percentile(values, percent)
    assert found.value == min(enough)
    assert found.n == len(values)
    assert found.is_enough == (not math.isnan(found.low)) == (not math.isnan(found.high))
    if found.is_enough:
        assert found.low <= found.value <= found.high
    assert found.is_enough == (len(values) >= samples_needed(percent))


def test_nothing_has_no_percentile() -> None:
    found = percentile([], 50)
    assert math.isnan(found.value)
    assert not found.is_enough


def at_most(n: int, k: int, p: Fraction) -> Fraction:
    """The binomial distribution, exactly."""
    return sum((math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)), Fraction(0))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 60), percent=st.integers(1, 99), level=st.sampled_from([0.5, 0.9, 0.95]))
@example(n=1, percent=50, level=0.5)
@example(n=2, percent=50, level=0.5)  # a quarter is below, exactly
@example(n=36, percent=90, level=0.95)
@example(n=35, percent=90, level=0.95)
def test_intervals_keep_their_level_and_are_the_shortest(n: int, percent: int, level: float) -> None:
    p = Fraction(percent, 100)
    tail = (1 - Fraction(str(level))) / 2
    lows = [r for r in range(n) if at_most(n, r, p) <= tail]
    highs = [r for r in range(n) if at_most(n, r, p) >= 1 - tail]
    expected = (lows[-1], highs[0]) if lows and highs else None
    assert interval_ranks(n, percent, level=level) == expected


@pytest.mark.parametrize(("percent", "needed"), [(50, 6), (90, 36), (95, 72), (99, 368)])
def test_the_fewest_samples(percent: float, needed: int) -> None:
    assert samples_needed(percent) == needed
    assert interval_ranks(needed, percent) is not None
    assert interval_ranks(needed - 1, percent) is None


def test_intervals_cover_the_true_percentile() -> None:
    random = np.random.default_rng(0)
    true = -math.log(0.1)  # P90 of the exponential distribution
    found = [percentile(random.exponential(size=60), 90) for _ in range(600)]
    covered = np.mean([f.low <= true <= f.high for f in found])
    assert covered >= 0.93  # 0.95 and more, and three standard errors less


def test_many_samples_do_not_overflow() -> None:
    low, high = interval_ranks(200_000, 99) or (0, 0)
    assert 197_800 < low < rank(200_000, 99) < high < 198_200


@settings(deadline=None)
@given(
    values=hnp.arrays(np.float64, st.integers(0, 12), elements=st.floats(-5, 5) | st.just(math.nan)),
    percent=st.sampled_from(PERCENTS),
    data=st.data(),
)
def test_weights_are_repetitions(values: np.ndarray, percent: float, data: st.DataObject) -> None:
    weights = data.draw(hnp.arrays(np.int64, (3, len(values)), elements=st.integers(0, 4)))
    found = weighted_percentile(values, weights, percent)
    for got, row in zip(found, weights, strict=True):
        repeated = np.repeat(values, row)
        np.testing.assert_equal(got, percentile(repeated[~np.isnan(repeated)], percent).value)


@settings(deadline=None)
@given(blocks=st.integers(1, 20), length=st.integers(1, 25), seed=st.integers(0, 9))
def test_a_resample_has_as_many_blocks_as_there_are(blocks: int, length: int, seed: int) -> None:
    counts = block_counts(blocks, 7, length=length, seed=seed)
    assert counts.shape == (7, blocks)
    assert (counts.sum(axis=1) == blocks).all()
    assert (counts >= 0).all()
    if length >= blocks:  # one draw, all the way round
        assert (counts == 1).all()


def test_neighbours_are_drawn_together() -> None:
    counts = block_counts(12, 500, length=3, seed=1)
    alone = (counts > 0) & (np.roll(counts, 1, 1) == 0) & (np.roll(counts, -1, 1) == 0)
    assert not alone.any()
    assert block_counts(12, 500, seed=1).mean() == 1


@settings(deadline=None, max_examples=20)
@given(rounds=st.integers(6, 10), per_round=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_ratio_is_its_definition(rounds: int, per_round: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(rounds) * 3, per_round)
    over, under = random.uniform(1, 2, len(labels)), random.uniform(1, 2, len(labels))
    found = ratio(over, under, labels, resamples=40, seed=seed)
    medians = []
    for counts in block_counts(rounds, 40, seed=seed):
        drawn = [x for r, count in enumerate(counts) for x in (over / under)[labels == 3 * r].tolist() * count]
        medians.append(sorted(drawn)[rank(len(drawn), 50)])
    assert found.value == sorted(over / under)[rank(len(labels), 50)]
    assert found.low == sorted(medians)[rank(40, 2.5)]
    assert found.high == sorted(medians)[rank(40, 97.5)]
    assert (found.pairs, found.rounds) == (len(labels), rounds)


def test_pairs_take_the_rounds_mood_out() -> None:
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(30), 4)
    mood = random.uniform(1, 5, 30)[labels]
    found = ratio(1.2 * mood * random.normal(1, 0.01, 120), mood, labels)
    assert 1.19 < found.low < 1.2 < found.high < 1.21


def test_few_rounds_have_no_interval() -> None:
    found = ratio([2.0] * 5, [1.0] * 5, range(5))
    assert found.value == 2
    assert math.isnan(found.low)
    assert math.isnan(ratio([], [], []).value)
    with pytest.raises(ShapeError, match="three columns of one length"):
        ratio([1.0], [1.0, 2.0], [0])


def samples(cells: list[tuple[int, int, int]], failed: tuple[int, ...] = (), **stages: list[int]) -> Samples:
    """Of (round, input, latency)."""
    n = len(cells)
    number, about, spent = (np.array([cell[i] for cell in cells], np.int64) for i in range(3))
    bad = np.isin(np.arange(n), failed)
    zeros = np.zeros(n, np.int64)
    return Samples(number, about, zeros, zeros, spent, {k: np.array(v, np.int64) for k, v in stages.items()}, bad)


def test_pairs_are_of_one_round_and_input() -> None:
    one = samples([(0, 0, 10), (0, 0, 30), (0, 1, 5), (1, 0, 7), (2, 0, 9)], failed=(4,), decode=[1, 3, -1, 5, 6])
    other = samples([(2, 0, 1), (1, 0, 2), (0, 0, 4), (0, 2, 8)], decode=[1, 2, 4, 8])
    first, second, rounds = paired(one, other)
    assert (first.tolist(), second.tolist(), rounds.tolist()) == ([20, 7], [4, 2], [0, 1])
    assert cell_means(one, "decode") == {(0, 0): 2, (1, 0): 5, (2, 0): 6}
