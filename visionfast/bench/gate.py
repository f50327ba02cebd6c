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

An input that the baseline answered and this build does not fails the build at once, however fast the rest is.
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
        broken: what the baseline answered and this run did not: then it does not matter how fast it is.
        is_final: another run would say the same: what withholds the verdict is in the baseline, or in the question.
    """

    findings: tuple[Finding, ...]
    withheld: tuple[str, ...]
    notes: tuple[str, ...]
    broken: tuple[str, ...] = ()
    is_final: bool = False

    @property
    def status(self) -> Literal["broken", "slower", "not slower", "no verdict"]:
        if self.broken:
            return "broken"
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
    notes = list(_notes(baseline, current))
    broken: list[str] = []
    for_good = list(_disturbance(baseline, "the baseline"))  # what no other run would mend
    asked: list[Question] = []
    for scenario in scenarios:
        pair = (baseline.samples[key, scenario], current.samples[key, scenario])
        broke, failed_before = _failures(*pair)
        broken += [f"{scenario}: {broke} requests failed about images that the baseline answered"] if broke else []
        for_good += [f"{scenario}: {failed_before} requests failed, as in the baseline"] if failed_before else []
        if reason := _unlike(*pair):
            notes.append(f"{scenario}: not compared: {reason}")
            continue
        if (rounds := min(len(np.unique(samples.round)) for samples in pair)) < FEWEST_ROUNDS:
            for_good.append(f"{scenario}: expected {FEWEST_ROUNDS} rounds or more, got {rounds}; --seconds makes more")
            continue
        asked += questions(baseline, current, key, scenario, tolerance)
    if not asked and not for_good:
        for_good.append("the two have no scenario in common")
    withheld = [*for_good, *_disturbance(current, "this run")]
    totals = sum(question.part == TOTAL for question in asked)
    findings = tuple(
        question.answer(1 - (1 - _LEVEL) / (totals if question.part == TOTAL else len(asked)), resamples, seed)
        for question in asked
    )
    return Verdict(findings, tuple(withheld), tuple(notes), tuple(broken), is_final=bool(broken or for_good))


def check_comparable(baseline: Record, current: Record) -> None:
    """Raises `OptionError` unless both are of one engine on one machine, about the same inputs; `CertificateError`
    where the engine's certificate failed. A rebuilt engine of the same weights is the same one: that is what the
    question is about."""
    for fact in ("cpu", "cpus", "gpu", "system"):
        _same(f"machine: {fact}", baseline.environment, current.environment, fact)
    threads_before, threads = _threads(baseline), _threads(current)
    if threads_before and threads and threads_before != threads:
        raise OptionError(
            f"baseline: expected one with as many threads ({threads}), got {threads_before}; leave --threads out to "
            "have the baseline's, or measure a baseline with these"
        )
    before, after = _subject(baseline), _subject(current)
    for fact in ("weights_sha256", "backend", "precision", "device", "size_hw", "batch"):
        _same(f"engine: {fact}", before.details, after.details, fact)
    if before.key != after.key:
        raise OptionError(f"baseline: expected the system {after.key}, got {before.key}; measure the baseline again")
    if [i.sha256 for i in baseline.inputs] != [i.sha256 for i in current.inputs]:
        raise OptionError("baseline: it was measured on other images; name the same --images, or measure it again")
    if after.details.get("certificate") == "failed":
        raise CertificateError("the engine's certificate failed: it is not right, so how fast it is says nothing")


def _threads(record: Record) -> str:
    """The processors that its engine might use, by its command; empty where that does not tell."""
    said = record.command.get("threads", "")
    return record.environment.get("cpus", "") if said == "default" else said


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


def _disturbance(record: Record, name: str) -> Iterator[str]:
    if record.others_cpu_share is not None and record.others_cpu_share > QUIET:
        yield f"others took {record.others_cpu_share:.0%} of the processors during {name} (at most {QUIET:.0%})"


def _failures(before: Samples, after: Samples) -> tuple[int, int]:
    """Failed requests now: about inputs that never failed in the baseline, and about those that did."""
    known = np.isin(after.input[after.failed], before.input[before.failed])
    return int((~known).sum()), int(known.sum())


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
