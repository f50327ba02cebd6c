"""Requests come as each scenario says, and a wait is never lost. Systems here sleep; no test judges how well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from visionfast.bench.scenarios import Row, arrivals_ns, multi_stream, offline, samples_of, server, single_stream
from visionfast.bench.systems import Answer, Call, NullSystem, taking_turns
from visionfast.errors import ImageFormatError

MS = 1_000_000


def named(number: int) -> bytes:
    return b"%d" % number


class Counting:
    """Takes its time, and knows how many ask at once and what for."""

    def __init__(self, seconds: float = 0.002) -> None:
        self.seconds = seconds
        self.asked: list[bytes] = []
        self.most = self._now = 0
        self._lock = threading.Lock()

    def __call__(self, encoded: bytes) -> Answer:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.asked.append(encoded)
        time.sleep(self.seconds)
        with self._lock:
            self._now -= 1
        return Answer(encoded, {"sleep": 7})


RUNS: dict[str, Callable[[list[Call], list[int]], list[Row]]] = {
    "single-stream": lambda calls, order: single_stream(calls[0], order, named),
    "multi-stream": lambda calls, order: multi_stream(calls, order, named),
    "server": lambda calls, order: server(calls, order, arrivals_ns(len(order), 500, 0), named),
    "offline": lambda calls, order: offline(calls, order, named),
}


@pytest.mark.parametrize("scenario", RUNS)
@pytest.mark.parametrize("threads", [1, 3])
def test_everyone_is_asked_once_and_the_warm_up_is_not_counted(scenario: str, threads: int) -> None:
    system = Counting()
    order = [2, 0, 1, 2, 0, 1]
    rows = RUNS[scenario]([system] * threads, order)
    assert sorted(row.input for row in rows) == sorted(order)
    untimed = 1 if scenario == "single-stream" else threads
    assert len(system.asked) == len(order) + untimed
    assert all(row.due_ns <= row.begun_ns < row.done_ns and not row.failed for row in rows)
    assert [row.begun_ns for row in rows] == sorted(row.begun_ns for row in rows)
    assert all(row.stage_ns == {"sleep": 7} for row in rows)
    if scenario == "single-stream":
        assert system.most == 1
        assert [row.input for row in rows] == order
        assert all(row.due_ns == row.begun_ns for row in rows)


def test_groups_arrive_together_when_the_last_ones_are_answered() -> None:
    system = Counting(0.005)
    rows = multi_stream([system] * 3, [0, 1, 2, 3, 4], named)
    assert system.most == 3
    due = sorted({row.due_ns for row in rows})
    assert len(due) == 2
    groups = [[row for row in rows if row.due_ns == moment] for moment in due]
    assert [sorted(row.input for row in group) for group in groups] == [[0, 1, 2], [0, 3, 4]]  # full groups only
    assert max(row.done_ns for row in groups[0]) <= due[1]


def test_a_wait_for_a_slow_one_before_counts() -> None:
    """The omission that closed loops are known for: requests that were due meanwhile have waited."""
    system = Counting(0.03)
    due = np.array([0, MS, 2 * MS, 3 * MS], np.int64)
    rows = server([system], [0, 1, 2, 3], due, named)
    assert [row.input for row in rows] == [0, 1, 2, 3]
    assert np.diff([row.due_ns for row in rows]).tolist() == [MS, MS, MS]
    assert rows[3].begun_ns - rows[3].due_ns >= 80 * MS  # three of 30 ms were before it
    latency = [row.done_ns - row.due_ns for row in rows]
    assert latency == sorted(latency)


def test_nobody_begins_before_it_is_due() -> None:
    due = arrivals_ns(200, 2000, 3)
    rows = server([NullSystem().call] * 2, [0] * 200, due, named)
    began = rows[0].due_ns - int(due[0])
    assert sorted(row.due_ns - began for row in rows) == due.tolist()
    assert all(row.begun_ns >= row.due_ns for row in rows)


def test_arrivals_are_a_poisson_process() -> None:
    due = arrivals_ns(50_000, 20.0, seed=1)
    gaps = np.diff(due) / 1e9
    assert (gaps >= 0).all()
    assert abs(gaps.mean() - 0.05) < 0.001
    assert abs(gaps.std() - 0.05) < 0.001
    assert abs(np.mean(gaps > 0.05) - np.exp(-1)) < 0.01
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02
    assert (arrivals_ns(9, 20.0, seed=1) == due[:9]).all()
    assert arrivals_ns(9, 20.0, seed=2).tolist() != due[:9].tolist()


def failing(encoded: bytes) -> Answer:
    if encoded == b"1":
        raise ImageFormatError("image 1", "no image")
    return Answer(None)


@pytest.mark.parametrize("scenario", RUNS)
def test_an_images_failure_is_its_own(scenario: str) -> None:
    rows = RUNS[scenario]([failing] * 2, [0, 1, 2, 3])
    assert {row.input: row.failed for row in rows} == {0: False, 1: True, 2: False, 3: False}


class Broken:
    def __init__(self, good: int) -> None:
        self._left = good
        self._lock = threading.Lock()

    def __call__(self, encoded: bytes) -> Answer:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise ZeroDivisionError("a defect")
        return Answer(None)


@pytest.mark.parametrize("scenario", RUNS)
@pytest.mark.parametrize("good", [0, 5])
def test_a_defect_ends_all_threads(scenario: str, good: int) -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="a defect"):
        RUNS[scenario]([Broken(good)] * 3, list(range(30)))
    assert threading.active_count() == before


def test_turns_are_a_stage() -> None:
    systems = [Counting(0.02), Counting(0.02)]
    rows = multi_stream(taking_turns(systems, 4), [0, 1, 2, 3], named)
    assert max(system.most for system in systems) == 1
    assert all(row.stage_ns["sleep"] == 7 for row in rows)
    # All were due at once, and a session is free again 20 ms later at the earliest.
    began = sorted(row.begun_ns - row.due_ns + row.stage_ns["turn"] for row in rows)
    assert began[2] >= 20 * MS


def test_rows_become_columns() -> None:
    blocks = [
        (4, [Row(1, 0, 2, 9, {"a": 3}, False)]),
        (5, [Row(0, 1, 1, 2, {}, True), Row(1, 5, 6, 8, {"b": 1}, False)]),
    ]
    made = samples_of(blocks, {"parallel": 2})
    assert made.round.tolist() == [4, 5, 5]
    assert made.input.tolist() == [1, 0, 1]
    assert made.stage_ns["a"].tolist() == [3, -1, -1]
    assert made.stage_ns["b"].tolist() == [-1, -1, 1]
    assert made.latency_ns.tolist() == [9, 1, 3]
    assert made.failed.tolist() == [False, True, False]
    assert len(samples_of([], {})) == 0
