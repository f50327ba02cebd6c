"""The parts are the whole, or it is said by how much they are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.bench.breakdown import QUEUE, REST, breakdown
from visionfast.bench.records import Samples


def samples(rows: list[tuple[int, int, int, int]], failed: int = 0) -> Samples:
    """Of (queue, decode, engine, rest); a stage of -1 was not reached. `failed` more that took for ever."""
    n = len(rows) + failed
    table = np.array([*rows, *[(10**9, -1, -1, 0)] * failed], np.int64).reshape(-1, 4)
    begun = table[:, 0]
    done = begun + np.maximum(0, table[:, 1:].clip(min=0).sum(axis=1))
    done = np.where(table[:, 3] < 0, done + table[:, 3], done)  # a rest below nothing: the stages overlap
    stages = {"decode": table[:, 1], "engine": table[:, 2]}
    zeros = np.zeros(n, np.int64)
    return Samples(zeros, zeros, zeros, begun, np.maximum(done, begun), stages, np.arange(n) >= len(rows))


part = st.integers(0, 10**9)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(part, part | st.just(-1), part, part), min_size=1, max_size=20), failed=st.integers(0, 2)
)
def test_parts_add_up(rows: list[tuple[int, int, int, int]], failed: int) -> None:
    made = breakdown(samples(rows, failed))
    assert made.requests == len(rows)
    assert sum(made.parts_ns.values()) == pytest.approx(made.total_ns)
    assert made.excess == pytest.approx(0, abs=1e-9)
    assert made.adds_up
    assert list(made.parts_ns) == [QUEUE, "decode", "engine", REST]
    assert made.parts_ns["decode"] == pytest.approx(np.mean([max(0, row[1]) for row in rows]))
    assert made.parts_ns[REST] == pytest.approx(np.mean([row[3] for row in rows]))


def test_a_stage_that_is_counted_twice_is_found() -> None:
    rows = [(0, 100, 900, 0)] * 3
    assert breakdown(samples([*rows, (0, 100, 900, -50)])).excess == pytest.approx(50 / 3950)
    twice = breakdown(samples([(0, 500, 500, -400)] * 4))
    assert twice.excess == pytest.approx(400 / 600)
    assert not twice.adds_up


def test_one_requests_rest_does_not_hide_anothers_overlap() -> None:
    assert breakdown(samples([(0, 100, 100, 100), (0, 100, 100, -100)])).excess == pytest.approx(100 / 400)


def test_nothing_was_answered() -> None:
    made = breakdown(samples([], failed=2))
    assert made.requests == 0
    assert math.isnan(made.total_ns)
    assert made.adds_up
