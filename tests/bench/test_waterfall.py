"""The waterfall's arithmetic, on records whose figures are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_records import record_of, samples_of_ms, steps_record

from visionfast.bench.records import Record, System
from visionfast.bench.report_tables import waterfall_table
from visionfast.bench.waterfall import matched_latency_ns, waterfall


def _with_alone(record: Record, place: int, ms: float) -> Record:
    rounds = len(np.unique(record.samples["step-0", "single-stream"].round))
    alone = System(f"step-{place}-alone", "", "step", {"step": str(place), "alone": "yes"})
    samples = {**record.samples, (alone.key, "single-stream"): samples_of_ms([[ms, ms]] * rounds)}
    return record_of([*record.systems, alone], samples)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(0.01, 5000), min_size=2, max_size=9),
    st.integers(1, 9),
    st.integers(0, 5),
)
def test_the_savings_add_up(p50_ms: list[float], rounds: int, seed: int) -> None:
    found = waterfall(steps_record(p50_ms, rounds=rounds, seed=seed, noise=0.3))
    assert found is not None
    saved = [step.saved_ms.value for step in found.steps if step.saved_ms]
    whole = found.steps[0].p50_ms - found.steps[-1].p50_ms
    assert sum(saved) == pytest.approx(whole, abs=1e-9 * max(p50_ms))
    assert found.saved_ms.value == pytest.approx(whole)
    assert [step.key for step in found.steps] == [f"step-{i}" for i in range(len(p50_ms))]
    assert found.speedup.value == pytest.approx(found.steps[0].p50_ms / found.steps[-1].p50_ms)


def test_known_figures_and_their_intervals() -> None:
    found = waterfall(steps_record([100, 60, 60, 20], rounds=40))
    assert found is not None
    first, second, third, last = found.steps
    assert [step.p50_ms for step in found.steps] == pytest.approx([100, 60, 60, 20], rel=0.02)
    assert first.saved_ms is None
    assert second.saved_ms is not None
    assert third.saved_ms is not None
    assert last.saved_ms is not None
    assert second.saved_ms.sure
    assert second.saved_ms.low is not None
    assert second.saved_ms.high is not None
    assert second.saved_ms.low < 40 < second.saved_ms.high
    assert second.saved_ms.high - second.saved_ms.low < 4
    assert not third.saved_ms.sure  # nothing was changed there
    assert found.rounds == 40
    assert first.n == 80


def test_tails_say_whether_there_are_enough_samples() -> None:
    found = waterfall(steps_record([100, 60], rounds=40))  # of two images
    assert found is not None
    for step in found.steps:
        assert step.p95_ns.is_enough
        assert not step.p99_ns.is_enough
        assert step.p95_ns.n == step.n == 80
    assert waterfall_table(found).count("too few samples") == 2


def test_no_waterfall_of_an_engine_that_is_not_right() -> None:
    record = steps_record([100, 60])
    systems = [record.systems[0], replace(record.systems[1], details={"step": "1", "certificate": "failed"})]
    assert waterfall(record_of(systems, record.samples)) is None


def test_a_step_that_costs_something_saves_less_than_nothing() -> None:
    found = waterfall(steps_record([50, 80]))
    assert found is not None
    saved = found.steps[1].saved_ms
    assert saved is not None
    assert saved.value == pytest.approx(-30, rel=0.05)
    assert saved.sure


def test_few_rounds_have_no_interval() -> None:
    found = waterfall(steps_record([50, 40], rounds=4))
    assert found is not None
    assert found.saved_ms.low is None
    assert not found.saved_ms.sure
    assert found.speedup.high is None


def test_a_change_by_itself_is_told_beside_it() -> None:
    found = waterfall(_with_alone(steps_record([100, 60, 20]), 2, 90))
    assert found is not None
    _, second, third = found.steps
    assert second.alone_ms is None
    assert third.alone_ms is not None
    assert third.alone_ms.value == pytest.approx(100 - 90, abs=3)  # from naive, not from the step before


def test_a_step_may_be_its_own_change_by_itself() -> None:
    record = steps_record([100, 60])
    details = {**record.systems[1].details, "by itself": "yes"}
    systems = [record.systems[0], System("step-1", "change", "step", details)]
    found = waterfall(record_of(systems, record.samples))
    assert found is not None
    assert found.steps[1].alone_ms == found.steps[1].saved_ms


def test_stages_and_what_is_between_them_are_the_mean() -> None:
    systems = [System(f"step-{i}", f"change {i}", "step", {"step": str(i)}) for i in range(2)]
    stages = {"decode": 2.0, "engine": 7.0}
    samples = {(s.key, "single-stream"): samples_of_ms([[10.0, 12.0]] * 6, stages) for s in systems}
    found = waterfall(record_of(systems, samples))  # type: ignore[arg-type]
    assert found is not None
    for step in found.steps:
        assert sum(step.stage_ms.values()) == pytest.approx(step.mean_ms) == pytest.approx(11.0)
        assert step.stage_ms["engine"] == pytest.approx(7.0)


@pytest.mark.parametrize("kinds", [[], ["visionfast", "naive"], ["step"]])
def test_no_waterfall_without_two_steps(kinds: list[str]) -> None:
    systems = [System(f"{i}", "", kind, {"step": str(i)}) for i, kind in enumerate(kinds)]  # type: ignore[arg-type]
    samples = {(s.key, "single-stream"): samples_of_ms([[1.0, 1.0]] * 6) for s in systems}
    assert waterfall(record_of(systems, samples)) is None  # type: ignore[arg-type]


def test_rounds_are_matched() -> None:
    whole = samples_of_ms([[1, 2], [3, 4], [5, 6]])
    failed = samples_of_ms([[10, 20], [30, 40], [50, 60]], failed=[2])
    shorter = samples_of_ms([[7, 8], [9, 10]])
    got = matched_latency_ns([whole, failed, shorter]) // 1_000_000
    assert got.tolist() == [[[1, 2]], [[10, 20]], [[7, 8]]]  # round 1 has a failure, round 2 is not in the last
    assert matched_latency_ns([whole, samples_of_ms([[1, 2], [3, 4]], failed=[0, 2])]).size == 0
    assert matched_latency_ns([]).shape == (0, 0, 0)


def test_an_image_that_comes_twice_in_a_round_is_two() -> None:
    twice = samples_of_ms([[1, 2], [3, 4]])
    twice.input[:] = 0
    assert (matched_latency_ns([twice, twice]) // 1_000_000)[0].tolist() == [[1, 2], [3, 4]]
