"""The gate on made-up runs: it lets noise pass, finds what is slower and names the stage, or says that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic_runs import STAGES_NS, synthetic

from visionfast.bench.gate import Verdict, compare
from visionfast.bench.gate_questions import TOTAL, Finding
from visionfast.bench.gate_run import decide
from visionfast.bench.records import Record
from visionfast.bench.render import show_verdict
from visionfast.errors import CertificateError, OptionError

ALL = dict.fromkeys(STAGES_NS, 1.10)
QUICK: dict[str, Any] = {"resamples": 400}


def test_an_unchanged_build_passes() -> None:
    """Also where the machine is in another mood, and where the system differs from run to run by 1 %."""
    alarms = sum(
        compare(
            synthetic(2 * i, mood=1 + 0.1 * np.sin(i), drift=0.01),
            synthetic(2 * i + 1, mood=1 + 0.1 * np.cos(i), drift=0.01),
            **QUICK,
        ).status
        == "slower"
        for i in range(40)
    )
    assert alarms == 0


def test_alarms_keep_their_level_where_the_tolerance_is_just_reached() -> None:
    """At most 5 % of the runs that are slower by exactly what is tolerated, the worst case of those to let pass."""
    slower = dict.fromkeys(STAGES_NS, 1.05)
    verdicts = [compare(synthetic(2 * i), synthetic(2 * i + 1, slower=slower), **QUICK) for i in range(60)]
    alarms = sum(any(f.part == TOTAL for f in verdict.slower) for verdict in verdicts)
    assert alarms <= 6  # of a binomial with 60 and 0.05, fewer than 3 in a hundred are more


def test_ten_percent_are_found() -> None:
    found = [compare(synthetic(2 * i), synthetic(2 * i + 1, slower=ALL), **QUICK) for i in range(20)]
    assert sum(verdict.status == "slower" for verdict in found) >= 19
    assert all(verdict.stage == "engine" for verdict in found if verdict.slower)
    total = found[0].slower[0]
    assert total.part == TOTAL
    assert 1.05 < total.low < total.ratio < 1.13
    assert total.added_ns == pytest.approx(4e6, rel=0.5)
    assert str(total).startswith("single-stream: total is 1.")


def test_a_stage_is_named() -> None:
    verdict = compare(synthetic(0), synthetic(1, slower={"postprocess": 2.0}), **QUICK)
    assert [f.part for f in verdict.slower] == ["postprocess"]
    assert verdict.stage == "postprocess"
    verdict = compare(synthetic(0), synthetic(1, slower={"engine": 1.15}), **QUICK)
    assert {f.part for f in verdict.slower} >= {TOTAL, "engine"}
    assert not {f.part for f in verdict.slower} & {"decode", "preprocess", "postprocess"}
    assert verdict.stage == "engine"


def test_what_costs_nothing_does_not_fail_by_itself() -> None:
    verdict = compare(synthetic(0), synthetic(1, slower={"postprocess": 1.2}), **QUICK)  # 0.16 ms of 40
    assert verdict.status == "not slower"
    (finding,) = (f for f in verdict.findings if f.part == "postprocess")
    assert finding.low > 1.1


def test_a_tail_is_found() -> None:
    verdict = compare(synthetic(0), synthetic(1, tail=0.4), **QUICK)
    assert [f.part for f in verdict.slower] == ["total, P90"]
    assert compare(synthetic(0), synthetic(1, tail=0.05), **QUICK).status == "not slower"


def test_a_slower_machine_is_no_slower_build() -> None:
    slow = synthetic(1, mood=1.3)
    assert compare(synthetic(0), slow, **QUICK).status == "not slower"
    assert compare(synthetic(0, control=False), synthetic(1, mood=1.3, control=False), **QUICK).status == "slower"


def test_a_faster_machine_hides_no_slower_build_behind_its_control() -> None:
    """What is as slow as before on a machine that is quicker is not called slower: both have to say so."""
    assert compare(synthetic(0), synthetic(1, mood=0.85, slower=ALL), **QUICK).status == "not slower"


def test_faster_is_fine() -> None:
    verdict = compare(synthetic(0), synthetic(1, slower=dict.fromkeys(STAGES_NS, 0.5)), **QUICK)
    assert verdict.status == "not slower"
    assert verdict.findings[0].ratio < 0.55


def test_each_scenario_by_itself_and_queues_get_more_room() -> None:
    scenarios: Any = ("single-stream", "multi-stream", "server", "offline")
    verdict = compare(synthetic(0, scenarios=scenarios), synthetic(1, scenarios=scenarios), **QUICK)
    assert verdict.status == "not slower"
    limits = {f.scenario: f.limit for f in verdict.findings if f.part == TOTAL}
    assert limits["single-stream"] == limits["offline"] == 1.05
    assert 1.09 < limits["server"] < 1.12  # half of the time somebody works: twice the tolerance
    assert len({(f.scenario, f.part) for f in verdict.findings}) == len(verdict.findings) == 24
    slower = compare(synthetic(0, scenarios=scenarios), synthetic(1, scenarios=scenarios, slower=ALL), **QUICK)
    assert slower.status == "slower"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"others": 0.2}, "others took 20% of the processors during this run"),
        ({"rounds": 7}, "expected 8 rounds or more, got 7"),
        ({"scenarios": ("offline",)}, "no scenario in common"),
    ],
)
def test_a_verdict_is_withheld(options: dict[str, Any], said: str) -> None:
    verdict = compare(synthetic(0), synthetic(1, slower=ALL, **options), **QUICK)
    assert verdict.status == "no verdict"
    assert any(said in reason for reason in verdict.withheld)


def test_unknown_load_is_no_disturbance() -> None:
    assert compare(synthetic(0, others=None), synthetic(1, others=None), **QUICK).status == "not slower"


@pytest.mark.parametrize("others", [0.01, 0.5])
def test_what_fails_and_was_answered_before_is_broken(others: float) -> None:
    """A noisy neighbour does not make a request fail."""
    for which in (3, slice(None)):
        current = synthetic(1, others=others)
        current.samples["visionfast", "single-stream"].failed[which] = True
        verdict = compare(synthetic(0), current, **QUICK)
        assert verdict.status == "broken"
        n = 1 if which == 3 else 24 * 6
        assert verdict.broken == (f"single-stream: {n} requests failed about images that the baseline answered",)


def test_what_failed_before_too_withholds_it() -> None:
    baseline, current = synthetic(0), synthetic(1)
    for record in (baseline, current):
        samples = record.samples["visionfast", "single-stream"]
        samples.failed[samples.input == 3] = True
    verdict = compare(baseline, current, **QUICK)
    assert verdict.status == "no verdict"
    assert verdict.withheld == ("single-stream: 24 requests failed, as in the baseline",)


def test_a_baselines_names_are_only_shown(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[31m[/bold]"
    finding = Finding("offline", hostile, 1.2, 1.1, 1.05, 1e6, True)
    show_verdict(Verdict((finding,), (), ()), hostile)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("[/bold]") == 3  # the file, the part, and the stage that it is


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"environment": {"cpu": "another"}}, r"same machine: cpu \(another\), got a processor"),
        ({"environment": {"gpu": "a card"}}, "machine: gpu"),
        ({"details": {"weights_sha256": "00"}}, "engine: weights_sha256"),
        ({"details": {"precision": "bf16"}}, "engine: precision"),
        ({"inputs": 5}, "measured on other images"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        compare(synthetic(0), synthetic(1, **options), **QUICK)


@pytest.mark.parametrize(("before", "now"), [("1", "default"), ("default", "1"), ("2", "3")])
def test_other_threads_are_refused(before: str, now: str) -> None:
    made = [replace(synthetic(i), command={"threads": threads}) for i, threads in enumerate((before, now))]
    with pytest.raises(OptionError, match="as many threads"):
        compare(*made, **QUICK)


@pytest.mark.parametrize(("before", "now"), [("2", "default"), ("", "1")])
def test_all_processors_are_as_many_threads(before: str, now: str) -> None:
    """And a record that does not tell is believed."""
    made = [replace(synthetic(i), command={"threads": threads}) for i, threads in enumerate((before, now))]
    assert compare(*made, **QUICK).status == "not slower"


@pytest.mark.parametrize("tolerance", [0, 1, -0.1, float("nan")])
def test_tolerances(tolerance: float) -> None:
    with pytest.raises(OptionError, match="tolerance"):
        compare(synthetic(0), synthetic(1), tolerance=tolerance)


def test_a_wrong_engine_is_not_compared() -> None:
    with pytest.raises(CertificateError, match="certificate failed"):
        compare(synthetic(0), synthetic(1, details={"certificate": "failed"}))


def test_other_versions_are_noted() -> None:
    current = synthetic(1, environment={"openvino": "2"}, details={"engine_sha256": "00"})
    verdict = compare(synthetic(0), current, **QUICK)
    assert verdict.status == "not slower"
    assert verdict.notes == (f"engine_sha256: {'cd' * 32} then, 00 now", "openvino: 1 then, 2 now")


# ---- asking again -----------------------------------------------------------------------------------------


def runs(*records: Record) -> Any:
    each: Iterator[Record] = iter(records)
    return lambda: next(each)


def test_slower_is_said_when_it_was_seen_twice() -> None:
    slow, fine, loud = synthetic(1, slower=ALL), synthetic(2), synthetic(3, others=0.5)
    told: list[str] = []
    verdict, record = decide(synthetic(0), runs(slow, synthetic(4, slower=ALL)), tell=told.append)
    assert verdict.status == "slower"
    assert record is not slow
    assert len(told) == 1
    assert told[0].endswith("once; measuring again")
    assert decide(synthetic(0), runs(slow, fine))[0].status == "not slower"
    assert decide(synthetic(0), runs(loud, fine))[0].status == "not slower"
    assert decide(synthetic(0), runs(slow, loud, slow))[0].status == "slower"
    verdict, _ = decide(synthetic(0), runs(loud, loud, slow))
    assert verdict.status == "no verdict"
    assert "no other run was quiet" in verdict.withheld[0]


@pytest.mark.parametrize(
    ("baseline", "said"),
    [({"rounds": 7}, "expected 8 rounds or more, got 7"), ({"scenarios": ("offline",)}, "no scenario in common")],
)
def test_what_no_run_can_mend_is_measured_once(baseline: dict[str, Any], said: str) -> None:
    verdict, _ = decide(synthetic(0, **baseline), runs(synthetic(1)))
    assert verdict.status == "no verdict"
    assert said in verdict.withheld[0]


def test_what_is_broken_is_measured_once() -> None:
    broken = synthetic(1, others=0.4)
    broken.samples["visionfast", "single-stream"].failed[3] = True
    assert decide(synthetic(0), runs(broken))[0].status == "broken"


def test_a_disturbed_baseline_is_not_measured_against_again() -> None:
    verdict, _ = decide(synthetic(0, others=0.4), runs(synthetic(1)))
    assert verdict.status == "no verdict"
    assert "during the baseline" in verdict.withheld[0]
