"""From naive PyTorch to visionfast, one change after the other: what each of them saves.

The steps are systems of a record (`bench.steps` makes and measures them), timed in turns within the same rounds, all
from the encoded bytes to the results in host memory. A step's saving is the difference of the medians of the step
before it and its own, so that the savings add up to naive minus visionfast, by construction; how sure each of them is
comes from resampling the rounds, all steps together (a paired bootstrap: Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapters 8 and 13). The stages inside a step are means, which add up too.

P50 is each image's median over the rounds, averaged over the images: the median of all of them together would jump from
one image's latencies to another's where images differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from visionfast.bench.breakdown import breakdown
from visionfast.bench.records import Record, Samples, Scenario
from visionfast.bench.statistics import Percentile, percentile

__all__ = ["Interval", "Step", "Waterfall", "matched_latency_ns", "waterfall"]

_SCENARIO: Scenario = "single-stream"
_RESAMPLES = 2000
_FEWEST_ROUNDS = 5  # below, resampling says nothing about how sure a figure is


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % interval, milliseconds; `low` and `high` are `None` with fewer than five rounds."""

    value: float
    low: float | None
    high: float | None

    @property
    def sure(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One change, on top of those before it.

    Attributes:
        key: of its system in the record.
        name: of the change, for people: `compiled engine`.
        about: what stands where now, in a line.
        n: images timed.
        p50_ms: median latency, of each image, averaged over the images.
        p95_ns, p99_ns: of all its latencies, nanoseconds.
        mean_ms: of its latency.
        stage_ms: mean of each part of it (`bench.breakdown`), which add up to `mean_ms`.
        saved_ms: P50 of the step before minus its own; `None` for the first one.
        alone_ms: P50 of the first step minus that of the first step with this change only; `None` where that is not
            measured.
        agreement: with eager FP32 PyTorch, in words; empty where that is not known.
        at_once: images that are answered at the same time; above 1 its latency is the time for each of them, which
            every single one exceeds.
    """

    key: str
    name: str
    about: str
    n: int
    p50_ms: float
    p95_ns: Percentile
    p99_ns: Percentile
    mean_ms: float
    stage_ms: Mapping[str, float] = field(default_factory=dict)
    saved_ms: Interval | None = None
    alone_ms: Interval | None = None
    agreement: str = ""
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Waterfall:
    """All changes in their order, from the slowest.

    Attributes:
        steps: the first one is what is changed.
        rounds: that all steps were timed in.
        saved_ms: P50 of the first step minus that of the last one: the sum of the steps' savings.
        speedup: P50 of the first step over that of the last one, with its interval (no milliseconds).
    """

    steps: tuple[Step, ...]
    rounds: int
    saved_ms: Interval
    speedup: Interval


def waterfall(record: Record) -> Waterfall | None:
    """The waterfall among a record's systems, or `None` where there is none, or an engine's certificate failed.

    Its systems are of the kind `step`; their details tell `step` (a number), `about`, `agreement` and `at once`. A
    system with `alone` shows that step's change by itself, on top of the first step; `by itself` says that the step
    does so already: the changes before it make no difference to it.
    """
    found = [s for s in record.systems if s.kind == "step" and (s.key, _SCENARIO) in record.samples]
    in_turn = sorted((s for s in found if "alone" not in s.details), key=lambda s: int(s.details["step"]))
    if len(in_turn) < 2 or any(s.details.get("certificate") == "failed" for s in found):
        return None
    alone = {s.details["step"]: s.key for s in found if "alone" in s.details}
    keys = [*(s.key for s in in_turn), *alone.values()]
    latency_ns = matched_latency_ns([record.samples[key, _SCENARIO] for key in keys])  # (S, R, K)
    if not latency_ns.size:
        return None
    medians_ms = np.median(latency_ns, axis=1).mean(axis=1) / 1e6  # (S,)
    resampled_ms = _resampled_medians(latency_ns) / 1e6  # (B, S)
    index = {key: i for i, key in enumerate(keys)}

    def difference(before: str, after: str) -> Interval:
        i, j = index[before], index[after]
        return _interval(medians_ms[i] - medians_ms[j], resampled_ms[:, i] - resampled_ms[:, j])

    steps: list[Step] = []
    for system in in_turn:
        only = alone.get(system.details["step"]) or (system.key if "by itself" in system.details else None)
        all_ns = latency_ns[index[system.key]].ravel()
        parts = breakdown(record.samples[system.key, _SCENARIO])
        steps.append(
            Step(
                key=system.key,
                name=system.name,
                about=system.details.get("about", ""),
                n=len(all_ns),
                p50_ms=float(medians_ms[index[system.key]]),
                p95_ns=percentile(all_ns, 95),
                p99_ns=percentile(all_ns, 99),
                mean_ms=parts.total_ns / 1e6,
                stage_ms={part: ns / 1e6 for part, ns in parts.parts_ns.items() if ns},
                saved_ms=difference(steps[-1].key, system.key) if steps else None,
                alone_ms=difference(steps[0].key, only) if steps and only else None,
                agreement=system.details.get("agreement", ""),
                at_once=int(system.details.get("at once", "1")),
            )
        )
    first, last = index[steps[0].key], index[steps[-1].key]
    return Waterfall(
        steps=tuple(steps),
        rounds=latency_ns.shape[1],
        saved_ms=difference(steps[0].key, steps[-1].key),
        speedup=_interval(medians_ms[first] / medians_ms[last], resampled_ms[:, first] / resampled_ms[:, last]),
    )


def matched_latency_ns(columns: Sequence[Samples]) -> npt.NDArray[np.int64]:
    """Latencies of S systems on the same images in the same rounds: (S, R, K), K images a round.

    A round in which one of them failed, or that one of them does not have, is left out; so are rounds with another
    number of images than most.
    """
    tables: list[dict[int, dict[tuple[int, int], int]]] = []  # round → (image, its turn in the round) → nanoseconds
    for samples in columns:
        table: dict[int, dict[tuple[int, int], int]] = {}
        broken: set[int] = set()
        for row in range(len(samples.round)):
            number, image = int(samples.round[row]), int(samples.input[row])
            if samples.failed[row]:
                broken.add(number)
            turns = table.setdefault(number, {})
            turn = sum(1 for seen, _ in turns if seen == image)
            turns[image, turn] = int(samples.done_ns[row] - samples.due_ns[row])
        tables.append({number: turns for number, turns in table.items() if number not in broken})
    empty = np.zeros((len(columns), 0, 0), np.int64)
    if not tables:
        return empty
    shared = [n for n in sorted(tables[0]) if all(n in t and t[n].keys() == tables[0][n].keys() for t in tables)]
    if not shared:
        return empty
    sizes = [len(tables[0][number]) for number in shared]
    usual = max(set(sizes), key=lambda size: (sizes.count(size), size))
    shared = [number for number, size in zip(shared, sizes, strict=True) if size == usual]
    order = [sorted(tables[0][number]) for number in shared]
    return np.array(
        [[[t[n][pair] for pair in pairs] for n, pairs in zip(shared, order, strict=True)] for t in tables], np.int64
    )


def _resampled_medians(latency_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """(S, R, K) → (B, S): P50 over rounds drawn with replacement, the same ones for every system."""
    systems, rounds, _ = latency_ns.shape
    drawn = np.random.default_rng(0).integers(0, rounds, (_RESAMPLES, rounds))
    medians = np.empty((_RESAMPLES, systems))
    for i in range(systems):  # (B, R, K) at a time
        medians[:, i] = np.median(latency_ns[i][drawn], axis=1).mean(axis=1)
    if rounds < _FEWEST_ROUNDS:
        medians[:] = np.nan
    return medians


def _interval(value: float, resampled: npt.NDArray[np.float64]) -> Interval:
    if np.isnan(resampled).any():
        return Interval(float(value), None, None)
    low, high = np.percentile(resampled, (2.5, 97.5))
    return Interval(float(value), float(low), float(high))
