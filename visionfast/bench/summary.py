"""Each scenario's one headline figure, and what stands beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from visionfast.bench.breakdown import Breakdown, breakdown
from visionfast.bench.comparison import answered_by_round
from visionfast.bench.records import Record, Samples, Scenario
from visionfast.bench.server_rate import keeps, late_share
from visionfast.bench.statistics import LEVEL, Percentile, block_counts, percentile, samples_needed

__all__ = ["PERCENTS", "Summary", "Throughput", "query_latency_ns", "summaries", "throughput"]

PERCENTS = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Images a second, with the bootstrap's interval over rounds; NaN where it cannot be told."""

    per_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One system in one scenario.

    Attributes:
        system: its key.
        scenario: that it was asked in.
        latency_ns: percent → percentile, of the answered requests; in `multi-stream` until all of a group are answered.
        throughput: answered requests a second.
        settings: of the samples.
        late_share: in `server`, of the requests that exceeded the bound or failed, 0..1; else 0.
        keeps_bound: in `server`, whether at most 1 % did; `None` elsewhere.
        failed: requests without an answer.
        parts: where the time went.
    """

    system: str
    scenario: Scenario
    latency_ns: Mapping[float, Percentile]
    throughput: Throughput
    settings: Mapping[str, float]
    late_share: float
    keeps_bound: bool | None
    failed: int
    parts: Breakdown

    @property
    def headline(self) -> str:
        """The scenario's metric, in words."""
        if self.scenario == "offline":
            return f"{self.throughput.per_s:.3g} images/s"
        if self.scenario == "server":
            rate, bound = self.settings.get("rate_per_s", math.nan), self.settings.get("bound_ms", math.nan)
            kept = "" if self.keeps_bound else f", not kept: {self.late_share:.1%} were late"
            return f"{rate:.3g} requests/s, 99 % within {bound:.4g} ms{kept}"
        percent = 90.0 if self.scenario == "single-stream" else 99.0
        found = self.latency_ns[percent]
        return f"P{percent:g} {found.value / 1e6:.4g} ms{'' if found.is_enough else ' (too few samples)'}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why not to believe a figure that is shown."""
        few = [found for found in self.latency_ns.values() if not found.is_enough]
        doubts = []
        if few:
            names = ", ".join(f"P{found.percent:g}" for found in few)
            needed = ", ".join(str(samples_needed(found.percent)) for found in few)
            doubts.append(f"too few samples for {names} (n={few[0].n}, needs {needed})")
        if self.failed:
            doubts.append(f"{self.failed} requests failed")
        if not self.parts.adds_up:
            doubts.append(f"the stages add up to {self.parts.excess:.1%} more than the latency")
        return tuple(doubts)


def summaries(record: Record) -> tuple[Summary, ...]:
    """Of every system in every scenario, in the record's order."""
    return tuple(_summary(key, scenario, samples) for (key, scenario), samples in record.samples.items())


def _summary(key: str, scenario: Scenario, samples: Samples) -> Summary:
    answered = samples.answered
    latency_ns = query_latency_ns(answered) if scenario == "multi-stream" else answered.latency_ns
    bound_ns = samples.settings.get("bound_ms", math.inf) * 1e6
    return Summary(
        system=key,
        scenario=scenario,
        latency_ns={percent: percentile(latency_ns, percent) for percent in PERCENTS},
        throughput=throughput(samples),
        settings=samples.settings,
        late_share=late_share(samples, bound_ns),
        keeps_bound=keeps(samples, bound_ns) if scenario == "server" else None,
        failed=int(samples.failed.sum()),
        parts=breakdown(samples),
    )


def query_latency_ns(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """(groups,) int64: of those that were due together, until the last one was answered."""
    due_ns, group = np.unique(samples.due_ns, return_inverse=True)
    last_ns = due_ns.copy()
    np.maximum.at(last_ns, group, samples.done_ns)
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = last_ns - due_ns
    return found


def throughput(samples: Samples, *, resamples: int = 1000) -> Throughput:
    """Answered requests over the time that their rounds took (`comparison.answered_by_round`)."""
    if samples.failed.all():  # also where there are none
        return Throughput(math.nan, math.nan, math.nan)
    counts, wall_s = answered_by_round(samples)
    per_s = float(counts.sum() / wall_s.sum())
    if len(counts) < 2:
        return Throughput(per_s, math.nan, math.nan)
    weights = block_counts(len(counts), resamples)
    resampled = (weights @ counts) / (weights @ wall_s)
    low, high = (percentile(resampled, 50 + sign * 50 * LEVEL).value for sign in (-1, 1))
    return Throughput(per_s, low, high)
