"""A run's record: everyone in every round, on the same inputs, with what is needed to believe it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from visionfast.bench.inputs import input_of
from visionfast.bench.records import SCENARIOS, Input, System, read_record, write_record
from visionfast.bench.run import harness_ns, measure
from visionfast.bench.server_rate import highest_rate, keeps, late_share
from visionfast.bench.statistics import paired
from visionfast.bench.summary import query_latency_ns, summaries, throughput
from visionfast.bench.systems import Answer, Call, ControlSystem
from visionfast.errors import BackendError, OptionError


class Sleeping:
    """A system that takes a time, and remembers what it was asked."""

    def __init__(self, key: str, seconds: float, *, kind: Any = "visionfast", caches: bool = False) -> None:
        self.system = System(key, key, kind, {"certificate": "passed"})
        self.caches = caches
        self.seconds = seconds
        self.asked: list[bytes] = []

    def call(self, encoded: bytes) -> Answer:
        self.asked.append(encoded)
        time.sleep(self.seconds)
        return Answer(None, {"sleep": int(self.seconds * 1e9)})

    def parallel(self, n: int) -> Sequence[Call]:
        return [self.call] * n

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def inputs() -> tuple[Input, ...]:
    pictures = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    return tuple(input_of(f"{i}.png", cv2.imencode(".png", p)[1].tobytes()) for i, p in enumerate(pictures))


def test_every_system_is_in_every_round(inputs: tuple[Input, ...], tmp_path: Path) -> None:
    systems = [Sleeping("a", 0.001), Sleeping("b", 0.002, kind="bare"), ControlSystem()]
    record = measure(
        systems,
        inputs,
        seconds=0.4,
        streams=2,
        rate_per_s=100.0,
        seed=3,
        all_inputs=True,  # whatever else this machine does meanwhile
        command={"seed": "3"},
    )
    assert record.scenarios == SCENARIOS
    assert [s.key for s in record.systems] == ["a", "b", "control"]
    assert record.command == {"seed": "3"}
    assert record.environment["numpy"] == np.__version__
    assert record.harness_ns.keys() == set(SCENARIOS)
    asked = {key for key, scenario in record.samples if scenario == "server"}
    assert asked == {"a", "control"}  # nobody serves on a bare engine
    for scenario in ("single-stream", "multi-stream", "offline"):
        a, b, control = (record.samples[key, scenario] for key in ("a", "b", "control"))
        assert set(a.round) == set(b.round) == set(control.round)
        assert len(set(a.round)) >= 6
        for number in set(a.round):
            for samples in (a, b, control):
                # Each input as often as the others, but where a group of two is filled up.
                counts = np.bincount(samples.input[samples.round == number], minlength=3)
                assert counts.min() >= 1
                assert np.ptp(counts) <= 1
        over, under, rounds = paired(a, b)
        assert len(over) == 3 * len(set(rounds))
        assert (under > 2_000_000).all()
    assert record.samples["a", "server"].settings["rate_per_s"] == 100.0
    assert record.samples["a", "single-stream"].settings == {"parallel": 1}
    assert record.samples["a", "offline"].settings == {"parallel": 2}
    write_record(tmp_path / "r.json", record)
    assert len(read_record(tmp_path / "r.json").samples) == len(record.samples)


def test_requests_of_what_caches_are_all_new(inputs: tuple[Input, ...]) -> None:
    new, again = Sleeping("new", 0.001, caches=True), Sleeping("again", 0.001)
    measure([new, again], inputs, scenarios=["single-stream", "offline"], seconds=0.2, streams=2, all_inputs=True)
    assert len(new.asked) == len(set(new.asked))
    assert set(again.asked) == {i.encoded for i in inputs}


def test_slow_systems_see_fewer_images(inputs: tuple[Input, ...]) -> None:
    slow = Sleeping("a", 0.02)
    record = measure([slow], inputs, scenarios=["single-stream"], seconds=0.3)
    assert [i.name for i in record.inputs] == ["0.png"]
    every = measure([slow], inputs, scenarios=["single-stream"], seconds=0.3, all_inputs=True)
    assert len(every.inputs) == 3
    assert set(every.samples["a", "single-stream"].input) == {0, 1, 2}


def test_the_rate_that_keeps_the_bound_is_found(inputs: tuple[Input, ...]) -> None:
    record = measure([Sleeping("a", 0.004)], inputs, scenarios=["server"], seconds=0.6, streams=2, bound_ms=200.0)
    samples = record.samples["a", "server"]
    assert samples.settings["bound_ms"] == 200.0
    assert 0 < samples.settings["rate_per_s"] < 2 / 0.004
    (summary,) = summaries(record)
    assert summary.keeps_bound == (summary.late_share <= 0.01)
    assert "requests/s, 99 % within 200 ms" in summary.headline


class Uneven(Sleeping):
    """Every third request takes ten times as long."""

    def call(self, encoded: bytes) -> Answer:
        time.sleep(9 * self.seconds if len(self.asked) % 3 == 2 else 0)
        return super().call(encoded)


def test_the_bound_of_server_alone_is_of_single_streams_p90_too(inputs: tuple[Input, ...]) -> None:
    record = measure([Uneven("a", 0.002)], inputs, scenarios=["server"], seconds=1.0, rate_per_s=20.0)
    bound_ms = record.samples["a", "server"].settings["bound_ms"]
    assert bound_ms > 3 * 20.0  # its mean is 8 ms


class Failing(Sleeping):
    def call(self, encoded: bytes) -> Answer:
        super().call(encoded)
        raise BackendError("nothing is answered")


@pytest.mark.parametrize("scenarios", [["server"], ["single-stream", "server"]])
def test_who_answers_nothing_has_no_bound_to_keep(inputs: tuple[Input, ...], scenarios: Any) -> None:
    told: list[str] = []
    systems = [Failing("a", 0.001), Sleeping("b", 0.001, kind="peer"), ControlSystem()]
    record = measure(systems, inputs, scenarios=scenarios, seconds=0.2, rate_per_s=50.0, progress=told.append)
    assert ("a", "server") not in record.samples
    assert ("b", "server") in record.samples
    assert any("a: left out: no request was answered" in line for line in told)


def test_the_search_halves_its_range() -> None:
    tried: list[float] = []

    def window(rate: float, seconds: float) -> Any:
        tried.append(rate)
        assert seconds == 2.0
        return Window(rate > 30)

    assert 28 <= highest_rate(window, 100.0, 1.0, 12.0) <= 30
    assert tried[0] == 50
    tried.clear()
    assert highest_rate(lambda rate, seconds: Window(tried.append(rate) is None), 64.0, 1.0, 1.0) == 8.0
    assert tried == [32.0, 16.0, 8.0]  # a bound that no rate keeps does not take an hour


class Window:
    """As `Samples`, as far as the search looks: all late, or none."""

    def __init__(self, late: bool) -> None:
        self.latency_ns = np.full(10, 2 if late else 1)
        self.failed = np.zeros(10, np.bool_)

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": 0.0}, "more than 0 seconds"),
        ({"rate_per_s": -1.0}, "requests a second"),
        ({"rate_per_s": float("inf")}, "requests a second, got inf"),
        ({"bound_ms": -1.0}, "of the bound, got -1"),
        ({"bound_ms": float("nan")}, "of the bound, got nan"),
        ({"streams": 0}, "streams: expected a whole number from 1"),
        ({"streams": 5000}, "streams: expected a whole number from 1"),
        ({"warmup": 0}, "warmups"),
    ],
)
def test_options(options: dict[str, Any], said: str, inputs: tuple[Input, ...]) -> None:
    with pytest.raises(OptionError, match=said):
        measure([Sleeping("a", 0.001)], inputs, **options)


def test_nobody_or_two_of_one_name(inputs: tuple[Input, ...]) -> None:
    for systems, given in (([], inputs), ([Sleeping("a", 0), Sleeping("a", 0)], inputs), ([Sleeping("a", 0)], ())):
        with pytest.raises(OptionError, match="different keys and an input"):
            measure(systems, given)


def test_the_harness_is_measured_in_each_scenario() -> None:
    found = harness_ns(2, SCENARIOS, requests=50)
    assert list(found) == list(SCENARIOS)
    assert all(spent > 0 for spent in found.values())


# ---- figures ----------------------------------------------------------------------------------------------


def test_headlines(inputs: tuple[Input, ...]) -> None:
    record = measure([Sleeping("a", 0.001)], inputs, seconds=0.2, streams=2, rate_per_s=50.0, bound_ms=500.0)
    by_scenario = {summary.scenario: summary for summary in summaries(record)}
    assert by_scenario["single-stream"].headline.startswith("P90 ")
    assert by_scenario["multi-stream"].headline.startswith("P99 ")
    assert by_scenario["server"].headline.startswith("50 requests/s, 99 % within 500 ms")
    assert by_scenario["offline"].headline.endswith(" images/s")
    assert any("too few samples for" in remark for remark in by_scenario["multi-stream"].remarks)
    for summary in by_scenario.values():
        assert summary.parts.adds_up


@pytest.mark.parametrize("scenario", ["multi-stream", "offline"])
def test_every_round_has_as_many_requests_for_each_thread(inputs: tuple[Input, ...], scenario: Any) -> None:
    """With three for two threads, the third would be both threads' time."""
    record = measure([Sleeping("a", 0.01)], inputs[:3], scenarios=[scenario], seconds=0.001, streams=2, all_inputs=True)
    _, counts = np.unique(record.samples["a", scenario].round, return_counts=True)
    assert set(counts.tolist()) == {4}


def test_a_single_image_is_given_to_every_thread_of_offline(inputs: tuple[Input, ...]) -> None:
    record = measure([Sleeping("a", 0.001)], inputs[:1], scenarios=["offline"], seconds=0.001, streams=3)
    assert len(record.samples["a", "offline"]) == 8 * 3


def test_a_group_is_answered_when_its_last_is(inputs: tuple[Input, ...]) -> None:
    record = measure([Sleeping("a", 0.001)], inputs, scenarios=["multi-stream"], seconds=0.1, streams=3)
    samples = record.samples["a", "multi-stream"]
    found = query_latency_ns(samples)
    assert len(found) == len(samples) / 3
    expected = [samples.latency_ns[samples.due_ns == due].max() for due in np.unique(samples.due_ns)]
    assert found.tolist() == expected


def test_throughput_is_what_was_answered_over_the_time_it_took(inputs: tuple[Input, ...]) -> None:
    record = measure([Sleeping("a", 0.002)], inputs, scenarios=["offline"], seconds=0.2, streams=2)
    samples = record.samples["a", "offline"]
    wall = sum(
        int(samples.done_ns[rows].max() - samples.begun_ns[rows].min())
        for rows in (samples.round == number for number in set(samples.round))
    )
    found = throughput(samples)
    assert found.per_s == pytest.approx(len(samples) / wall * 1e9)
    assert found.low <= found.per_s <= found.high
    assert np.isnan(throughput(samples[:0]).per_s)
    samples.failed[0] = True
    assert late_share(samples, 1e12) == pytest.approx(1 / len(samples))
    assert keeps(samples[1:], 1e12)
    assert not keeps(samples[1:], 0)
