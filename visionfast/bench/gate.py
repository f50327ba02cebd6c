"""Has an engine become slower than its baseline? A verdict about distributions, which a noisy machine does not fail.

Each scenario is compared by itself, in all and stage by stage:

1. A request's time is held against the median that its own input had in the baseline, so that inputs of all sizes are
   one distribution of relative times.
2. The control, fixed work that was measured in the same rounds, says how fast the machine was. A shift counts only
   where it is there with and without it: a machine that is slower today is no slower build.
3. The lower quartile and the median both have to shift; noise comes from above and moves the median alone. The tail,
   from the upper quartile to P90, is judged by itself, with twice the tolerance.
4. What decides is not the shift but the lower end of its interval, by a bootstrap over blocks of rounds (see
   `statistics.block_counts`). It has to exceed the tolerance. The error that is allowed, 5 %, is shared out among the
   scenarios, and as much again among all other questions.
5. A stage fails by itself only where it costs something: a fifth of the tolerance of the whole.

An unchanged build fails by what differs between two runs and not within one. That is what the tolerance is for, and
`benchmarks/gate_check.py` shows how often it happens; `gate_run` asks a second time before it says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from visionfast.bench.gate_questions import FEWEST_ROUNDS, TOTAL, WHOLE, Finding, Question, questions
from visionfast.bench.load import QUIET
from visionfast.bench.records import Record, Samples, System
from visionfast.errors import CertificateError, OptionError

__all__ = ["TOLERANCE", "Verdict", "check_comparable", "compare"]

TOLERANCE = 0.05

_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of it.

    Attributes:
        findings: every question's answer, where it could be asked.
        withheld: why there is no verdict; empty where there is one.
        notes: what else differs between the two.
    """

    findings: tuple[Finding, ...]
    withheld: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def status(self) -> Literal["slower", "not slower", "no verdict"]:
        if self.withheld:
            return "no verdict"
        return "slower" if self.slower else "not slower"

    @property
    def slower(self) -> tuple[Finding, ...]:
        """Those that failed: whole scenarios first, then what costs most."""
        failed = [finding for finding in self.findings if finding.is_slower]
        return tuple(sorted(failed, key=lambda f: (f.part not in WHOLE, -f.added_ns)))

    @property
    def stage(self) -> str | None:
        """The stage that has become longer by most, of a scenario that is slower; `None` where nothing is."""
        scenarios = {finding.scenario for finding in self.slower}
        stages = [f for f in self.findings if f.scenario in scenarios and f.part not in WHOLE]
        return max(stages, key=lambda f: f.added_ns).part if stages else None


def compare(
    baseline: Record, current: Record, *, tolerance: float = TOLERANCE, resamples: int = 2000, seed: int = 0
) -> Verdict:
    """Whether `current` is slower than `baseline`.

    Args:
        baseline, current: of the same engine on the same machine.
        tolerance: of the time, what it may take longer, e.g. 0.05.
        resamples: of the bootstrap.
        seed: of its draws.

    Raises:
        OptionError: they cannot be compared, or `tolerance` is out of its range.
        CertificateError: the current engine's certificate failed: how fast it is does not matter.
    """
    if not 0 < tolerance < 1:
        raise OptionError(f"tolerance: expected more than 0 and less than 1 (5% is 0.05), got {tolerance:g}")
    check_comparable(baseline, current)
    key = _subject(current).key
    scenarios = [s for s in current.scenarios if (key, s) in baseline.samples and (key, s) in current.samples]
    withheld, notes = list(_disturbances(baseline, current)), list(_notes(baseline, current))
    asked: list[Question] = []
    for scenario in scenarios:
        pair = (baseline.samples[key, scenario], current.samples[key, scenario])
        if reason := _unlike(*pair):
            notes.append(f"{scenario}: not compared: {reason}")
            continue
        if (rounds := min(len(np.unique(samples.round)) for samples in pair)) < FEWEST_ROUNDS:
            withheld.append(f"{scenario}: expected {FEWEST_ROUNDS} rounds or more, got {rounds}; --seconds makes more")
            continue
        asked += questions(baseline, current, key, scenario, tolerance)
    if not asked and not withheld:
        withheld.append("the two have no scenario in common")
    totals = sum(question.part == TOTAL for question in asked)
    findings = tuple(
        question.answer(1 - (1 - _LEVEL) / (totals if question.part == TOTAL else len(asked)), resamples, seed)
        for question in asked
    )
    return Verdict(findings, tuple(withheld), tuple(notes))


def check_comparable(baseline: Record, current: Record) -> None:
    """Raises `OptionError` unless both are of one engine on one machine, about the same inputs; `CertificateError`
    where the engine's certificate failed. A rebuilt engine of the same weights is the same one: that is what the
    question is about."""
    for fact in ("cpu", "cpus", "gpu", "system"):
        _same(f"machine: {fact}", baseline.environment, current.environment, fact)
    before, after = _subject(baseline), _subject(current)
    for fact in ("weights_sha256", "backend", "precision", "device", "size_hw", "batch"):
        _same(f"engine: {fact}", before.details, after.details, fact)
    if before.key != after.key:
        raise OptionError(f"baseline: expected the system {after.key}, got {before.key}; measure the baseline again")
    if [i.sha256 for i in baseline.inputs] != [i.sha256 for i in current.inputs]:
        raise OptionError("baseline: it was measured on other images; name the same --images, or measure it again")
    if after.details.get("certificate") == "failed":
        raise CertificateError("the engine's certificate failed: it is not right, so how fast it is says nothing")


def _same(what: str, baseline: Mapping[str, str], current: Mapping[str, str], fact: str) -> None:
    if baseline.get(fact) != current.get(fact):
        raise OptionError(
            f"baseline: expected the same {what} ({current.get(fact)}), got {baseline.get(fact)}; measure a baseline "
            "of this engine on this machine"
        )


def _subject(record: Record) -> System:
    """The engine that the record is about: the first system of its kind."""
    for system in record.systems:
        if system.kind == "visionfast":
            return system
    raise OptionError("baseline: expected a record of an engine (`visionfast bench ENGINE --json`), got one without")


def _disturbances(baseline: Record, current: Record) -> Iterator[str]:
    for name, record in (("the baseline", baseline), ("this run", current)):
        if record.others_cpu_share is not None and record.others_cpu_share > QUIET:
            yield f"others took {record.others_cpu_share:.0%} of the processors during {name} (at most {QUIET:.0%})"
    key = _subject(current).key
    for scenario in current.scenarios:
        if (samples := current.samples.get((key, scenario))) is not None and samples.failed.any():
            yield f"{scenario}: {int(samples.failed.sum())} requests failed"


def _notes(baseline: Record, current: Record) -> Iterator[str]:
    before, after = _subject(baseline).details, _subject(current).details
    pairs = [(before, after, "engine_sha256"), (before, after, "runtime_version")]
    pairs += [(baseline.environment, current.environment, name) for name in sorted(current.environment)]
    for old, new, fact in pairs:
        if old.get(fact) != new.get(fact) and fact not in ("load_average", "revision", "visionfast"):
            yield f"{fact}: {old.get(fact, 'unknown')} then, {new.get(fact, 'unknown')} now"


def _unlike(before: Samples, after: Samples) -> str:
    for setting in ("parallel", "rate_per_s"):
        if before.settings.get(setting) != after.settings.get(setting):
            return f"{setting} was {before.settings.get(setting)} then, {after.settings.get(setting)} now"
    return ""
