"""Figures out of samples, each with what is known of it: order statistics, and a bootstrap over blocks.

Nothing is assumed of how latencies are distributed. A percentile is one of the samples (the nearest rank), and its
interval is between two of them; where there are too few for that, there is no interval, and the percentile says little.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.bench.records import Samples
from visionfast.errors import ShapeError

__all__ = [
    "LEVEL",
    "Percentile",
    "Ratio",
    "block_counts",
    "cell_means",
    "interval_ranks",
    "paired",
    "percentile",
    "rank",
    "ratio",
    "samples_needed",
    "weighted_percentile",
]

LEVEL = 0.95
"""Of an interval where none is named."""

_ROUNDING = 1e-12
"""Of a probability that was added up."""

FloatArray = npt.NDArray[np.float64]


# ---- one distribution -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Percentile:
    """What so many percent of the samples do not exceed.

    Attributes:
        percent: e.g. 99.
        value: the sample of that rank; NaN where there is none.
        low, high: between these lies the true one, in `LEVEL` of all cases; NaN where there are too few samples.
        n: samples.
    """

    percent: float
    value: float
    low: float
    high: float
    n: int

    @property
    def is_enough(self) -> bool:
        """Whether the samples tell: the interval's two ends are among them."""
        return not math.isnan(self.high)


def rank(n: int, percent: float) -> int:
    """The position of a percentile among `n` ascending samples, from 0: the first that `percent` do not exceed."""
    # 0.29 * 100 is 28.999999999999996: what is a whole number but for rounding is one.
    return min(n - 1, max(0, math.ceil(round(n * percent / 100, 9)) - 1))


def percentile(values: npt.ArrayLike, percent: float, *, level: float = LEVEL) -> Percentile:
    """A percentile of samples with its interval.

    Args:
        values: (n,) numbers, in any order.
        percent: between 0 and 100.
        level: of the interval.
    """
    ascending = np.sort(np.asarray(values, np.float64))
    n = len(ascending)
    if n == 0:
        return Percentile(percent, math.nan, math.nan, math.nan, 0)
    ranks = interval_ranks(n, percent, level=level)
    low, high = (math.nan, math.nan) if ranks is None else (float(ascending[r]) for r in ranks)
    return Percentile(percent, float(ascending[rank(n, percent)]), low, high, n)


@functools.lru_cache(maxsize=256)
def interval_ranks(n: int, percent: float, *, level: float = LEVEL) -> tuple[int, int] | None:
    """Between which two of `n` ascending samples the true percentile lies, in at least `level` of all cases.

    The number of samples below it is binomial, whatever the distribution (David and Nagaraja, "Order Statistics",
    section 7.1). Of each tail at most half of what the level leaves is cut off.

    Returns:
        positions from 0; `None` where one end would have to be outside the samples.
    """
    tail = (1 - level) / 2
    below = np.cumsum(_binomial(n, percent / 100))  # below[k]: P(at most k samples are below the percentile)
    # Sample r (from 0) is under the percentile unless at most r are: P(at most r) ≤ tail for the lower end, and over
    # it unless more than r are: P(at most r) ≥ 1 - tail for the upper one.
    low = int(np.searchsorted(below, tail + _ROUNDING, side="right")) - 1
    high = int(np.searchsorted(below, 1 - tail - _ROUNDING, side="left"))
    return (low, high) if low >= 0 and high < n else None


def _binomial(n: int, p: float) -> FloatArray:
    """(n + 1,) probability of 0…n successes, by logarithms: 2000 choose 1000 is no float64."""
    k = np.arange(n + 1)
    log_factorial = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    log_choose = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
    made: FloatArray = np.exp(log_choose + k * math.log(p) + (n - k) * math.log1p(-p))
    return made


@functools.lru_cache(maxsize=64)
def samples_needed(percent: float, *, level: float = LEVEL) -> int:
    """The fewest samples with which a percentile has an interval: P90 36, P95 72, P99 368 at 95 %."""
    tail, p = (1 - level) / 2, percent / 100
    n = math.floor(max(math.log(tail) / math.log(p), math.log(tail) / math.log1p(-p)))
    while interval_ranks(n, percent, level=level) is None:
        n += 1
    return n


# ---- a bootstrap over blocks ------------------------------------------------------------------------------


def block_counts(blocks: int, resamples: int, *, length: int = 1, seed: int = 0) -> npt.NDArray[np.int64]:
    """(resamples, blocks) how often each block is in each resample, of as many blocks as there are.

    Neighbours are drawn together, `length` at a time and from the end on to the beginning (the circular block
    bootstrap, Politis and Romano 1992): a machine is in one mood for a while.
    """
    draws = -(-blocks // length)
    starts = np.random.default_rng(seed).integers(0, blocks, (resamples, draws))
    drawn = (starts[:, :, None] + np.arange(length)) % blocks  # (resamples, draws, length)
    drawn = drawn.reshape(resamples, -1)[:, :blocks]
    flat = drawn + blocks * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * blocks).reshape(resamples, blocks)


def weighted_percentile(values: FloatArray, weights: npt.NDArray[np.int64], percent: float) -> FloatArray:
    """The percentile of `values` where each is there as often as its weight says.

    Args:
        values: (n,) numbers; NaN is none of them.
        weights: (resamples, n), whole, at least 0.
        percent: between 0 and 100.

    Returns:
        (resamples,); NaN where all that is left weighs nothing.
    """
    known = ~np.isnan(values)
    order = np.argsort(values[known], kind="stable")
    ascending = values[known][order]
    if len(ascending) == 0:
        return np.full(len(weights), math.nan)
    until = np.cumsum(weights[:, known][:, order], axis=1)  # (resamples, n) samples up to and with this one
    total = until[:, -1]
    needed = np.maximum(1, np.ceil(np.round(total * percent / 100, 9)))  # as in `rank`, counted from 1
    position = (until < needed[:, None]).sum(axis=1)
    found: FloatArray = np.where(total > 0, ascending[np.minimum(position, len(ascending) - 1)], math.nan)
    return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times one is another.

    Attributes:
        value: the median of the pairs' ratios; NaN where there are none.
        low, high: of the bootstrap's interval; NaN where there are fewer than 6 rounds.
        pairs, rounds: that it is of.
    """

    value: float
    low: float
    high: float
    pairs: int
    rounds: int


_FEWEST_ROUNDS = 6
"""With 5 rounds a median's interval of 95 % has no two ends among them: `samples_needed(50)`."""


def ratio(
    numerator: npt.ArrayLike,
    denominator: npt.ArrayLike,
    rounds: npt.ArrayLike,
    *,
    level: float = LEVEL,
    resamples: int = 2000,
    seed: int = 0,
) -> Ratio:
    """The typical ratio of pairs that were measured side by side, and how sure it is.

    Whole rounds are resampled: what disturbed one pair disturbed its neighbours.

    Args:
        numerator, denominator: (n,) positive numbers, pair by pair; of `paired`.
        rounds: (n,) the round of each pair.
        level: of the interval.
        resamples: of the bootstrap.
        seed: of its draws.

    Raises:
        ShapeError: they are not of one length.
    """
    over, under = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    labels = np.asarray(rounds)
    if not over.shape == under.shape == labels.shape or over.ndim != 1:
        raise ShapeError(
            f"pairs: expected three columns of one length, got {over.shape}, {under.shape}, {labels.shape}"
        )
    if len(over) == 0:
        return Ratio(math.nan, math.nan, math.nan, 0, 0)
    ratios = over / under
    names, index = np.unique(labels, return_inverse=True)
    value = percentile(ratios, 50).value
    if len(names) < _FEWEST_ROUNDS:
        return Ratio(value, math.nan, math.nan, len(ratios), len(names))
    weights = block_counts(len(names), resamples, seed=seed)[:, index]  # (resamples, n)
    medians = weighted_percentile(ratios, weights, 50)
    low, high = (percentile(medians, 50 + sign * 50 * level).value for sign in (-1, 1))
    return Ratio(value, low, high, len(ratios), len(names))


def paired(one: Samples, other: Samples) -> tuple[FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """The requests that both answered on one input in one round; several of them are one by their mean.

    Args:
        one, other: samples of two systems in one scenario of one record.

    Returns:
        (n,) latencies of `one`, nanoseconds, (n,) of `other`, (n,) the rounds.
    """
    means = [cell_means(samples.answered, None) for samples in (one, other)]
    both = sorted(means[0].keys() & means[1].keys())
    first, second = (np.array([mean[key] for key in both], np.float64) for mean in means)
    return first, second, np.array([number for number, _ in both], np.int64)


def cell_means(samples: Samples, stage: str | None) -> dict[tuple[int, int], float]:
    """(round, input) → mean nanoseconds of a stage, of the latency for `None`; of requests that reached it."""
    values = samples.latency_ns if stage is None else samples.stage_ns.get(stage, np.full(len(samples), -1))
    reached = values >= 0
    keys, index, counts = np.unique(
        np.stack([samples.round[reached], samples.input[reached]], axis=1),
        axis=0,
        return_inverse=True,
        return_counts=True,
    )
    means = np.bincount(index.ravel(), values[reached], minlength=len(keys)) / counts
    return {(int(number), int(about)): float(mean) for (number, about), mean in zip(keys, means, strict=True)}
