"""What the gate asks of each scenario, and how one question is answered; `visionfast.bench.gate` says why so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.bench.breakdown import QUEUE
from visionfast.bench.records import Record, Samples, Scenario
from visionfast.bench.statistics import block_counts, cell_means, percentile, weighted_percentile

__all__ = ["FEWEST_ROUNDS", "TAIL", "TOTAL", "WHOLE", "Finding", "Question", "questions"]

TOTAL, TAIL = "total", "total, P90"
WHOLE = (TOTAL, TAIL)
"""The parts that are a request as a whole, and no stage."""

FEWEST_ROUNDS = 8

_WAITS = (QUEUE, "turn")  # not what a stage does, but how long others took
_BODY, _TAIL = (25.0, 50.0), (75.0, 90.0)

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Finding:
    """One question: is this part of this scenario slower?

    Attributes:
        scenario: that was run.
        part: `total`, `total, P90`, or a stage.
        ratio: current over baseline, of medians (of P90 for the tail), the machine's mood taken out.
        low: the ratio's lower end, the least of all that have to exceed the limit.
        limit: 1 and the tolerance; in `server` more, for a queue multiplies what its requests take.
        added_ns: what a request takes longer on average.
        is_slower: the verdict.
    """

    scenario: Scenario
    part: str
    ratio: float
    low: float
    limit: float
    added_ns: float
    is_slower: bool

    def __str__(self) -> str:
        return f"{self.scenario}: {self.part} is {self.ratio:.2f} × the baseline's (at least {self.low:.2f} ×)"


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Logarithms of one run's times against the baseline's median of the same input: (n,), and each one's round."""

    times: _Floats
    rounds: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Is this part of this scenario slower?

    Attributes:
        scenario, part, limit, added_ns: as in `Finding`.
        baseline, current: the part's times.
        controls: the control's in both runs; `None` where there was none.
        percents: those of the times that all have to have shifted.
        matters: it costs enough to fail by itself.
    """

    scenario: Scenario
    part: str
    baseline: _Side
    current: _Side
    controls: tuple[_Side, _Side] | None
    percents: Sequence[float]
    limit: float
    added_ns: float
    matters: bool

    def answer(self, level: float, resamples: int, seed: int) -> Finding:
        """Every percentile has to have shifted, with and without the control.

        Args:
            level: of the one-sided interval.
            resamples, seed: of the bootstrap.
        """
        sides = (self.baseline, self.current)
        shifts: list[_Floats] = []
        for percent in self.percents:
            raw = _shift(sides, percent, resamples, seed)
            shifts.append(raw)
            if self.controls is not None:
                # The same rounds are drawn for both: what the control has in common with the system cancels out.
                shifts.append(raw - _shift(self.controls, 50.0, resamples, seed, rounds_of=sides))
        low = min(percentile(shift[1:], 100 * (1 - level)).value for shift in shifts)
        ratio, least = math.exp(shifts[-1][0]), math.exp(low)
        is_slower = self.matters and least > self.limit
        return Finding(self.scenario, self.part, ratio, least, self.limit, self.added_ns, is_slower)


def _shift(
    sides: tuple[_Side, _Side],
    percent: float,
    resamples: int,
    seed: int,
    *,
    rounds_of: tuple[_Side, _Side] | None = None,
) -> _Floats:
    """(1 + resamples,) how far a percentile moved: as measured, and in each resample of both runs' rounds."""
    found = []
    for index, (side, drawn) in enumerate(zip(sides, rounds_of or sides, strict=True)):
        rounds = np.unique(drawn.rounds)
        # Neighbours are alike for a while: blocks of the cube root of their number.
        counts = block_counts(len(rounds), resamples, length=max(1, round(len(rounds) ** (1 / 3))), seed=seed + index)
        counts = np.concatenate([np.ones((1, len(rounds)), np.int64), counts])
        known = np.isin(side.rounds, rounds)
        weights = counts[:, np.searchsorted(rounds, side.rounds[known])]
        found.append(weighted_percentile(side.times[known], weights, percent))
    shift: _Floats = found[1] - found[0]
    return shift


def questions(baseline: Record, current: Record, key: str, scenario: Scenario, tolerance: float) -> Iterator[Question]:
    """All questions about one system in one scenario: the whole, its tail, and every stage that was there before."""
    pair = (baseline.samples[key, scenario], current.samples[key, scenario])
    controls = _control_sides(baseline, current, scenario)
    mean_ns = _mean_ns(pair[0], None)
    for part in (*WHOLE, *(stage for stage in pair[0].stage_ns if stage not in _WAITS)):
        is_whole = part in WHOLE
        stage = None if is_whole else part
        sides = _sides(*pair, stage)
        if sides is None:
            continue
        allowed = tolerance * (2 if part == TAIL else 1)
        if is_whole and scenario == "server":
            allowed /= 1 - _utilisation(pair[0])
        added_ns = _mean_ns(pair[1], stage) - _mean_ns(pair[0], stage)
        matters = is_whole or added_ns > mean_ns * tolerance / 5
        percents = _TAIL if part == TAIL else _BODY
        yield Question(scenario, part, *sides, controls, percents, 1 + allowed, added_ns, matters)


def _utilisation(samples: Samples) -> float:
    """Of the time of those who answer, the share in which they do, at most 0.9. The mean time in a queue's system grows
    with the service time as 1 / (1 - utilisation) of its growth (M/M/1)."""
    service_s = float((samples.done_ns - samples.begun_ns).mean()) / 1e9
    return min(
        0.9, service_s * samples.settings.get("rate_per_s", 0.0) / max(1.0, samples.settings.get("parallel", 1.0))
    )


def _mean_ns(samples: Samples, stage: str | None) -> float:
    answered = samples.answered
    if not len(answered):
        return 0.0
    if stage is None:
        return float(answered.latency_ns.mean())
    column = answered.stage_ns.get(stage)
    return 0.0 if column is None else float(column.clip(min=0).mean())


def _sides(before: Samples, after: Samples, stage: str | None) -> tuple[_Side, _Side] | None:
    """Both runs' relative times; `None` where a side has too few for a verdict."""
    cells = [cell_means(samples.answered, stage) for samples in (before, after)]
    by_input: dict[int, list[float]] = {}
    for (_, about), mean in cells[0].items():
        by_input.setdefault(about, []).append(mean)
    usual = {about: float(np.median(means)) for about, means in by_input.items()}
    made = []
    for means in cells:
        known = [
            (number, math.log(max(1.0, mean) / max(1.0, usual[about])))
            for (number, about), mean in means.items()
            if about in usual
        ]
        if len(known) < FEWEST_ROUNDS:
            return None
        made.append(_Side(np.array([time for _, time in known]), np.array([number for number, _ in known], np.int64)))
    return made[0], made[1]


def _control_sides(baseline: Record, current: Record, scenario: Scenario) -> tuple[_Side, _Side] | None:
    """The control in both runs: its work is the same whatever the input."""
    for key in [system.key for system in current.systems if system.kind == "control"]:
        if (key, scenario) in baseline.samples and (key, scenario) in current.samples:
            pair = [record.samples[key, scenario] for record in (baseline, current)]
            before, after = (_by_round(samples) for samples in pair)
            return before, after
    return None


def _by_round(samples: Samples) -> _Side:
    """One time a round, the median."""
    rounds = np.unique(samples.round)
    spent = [float(np.median(samples.latency_ns[samples.round == number])) for number in rounds]
    return _Side(np.log(np.maximum(1.0, spent)), rounds)
