"""Where a request's time went: what is told adds up, and nothing is told that is not known."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import async_client_of, client_of
from hypothesis import given
from hypothesis import strategies as st
from test_prompt_served import assert_same

from visionfast.errors import ImageError, OptionError, ServerError
from visionfast.serving.tracing import (
    Measured,
    ServerTime,
    Trace,
    chrome_events,
    server_time,
    steps_of,
    sums_of,
    trace_of,
)
from visionfast.waterfall import waterfall

NS = st.integers(0, 10**9)
STAGES = {"decode": 10, "preprocess": 5, "engine": 60, "postprocess": 5}
HERE = Measured(packed_ns=10, round_trip_ns=100, unpacked_ns=20)


def within(trace: Trace, depth: int) -> int:
    return sum(span.duration_ns for span in trace.spans if span.depth == depth)


def shape(trace: Trace) -> list[tuple[str, int, int, int]]:
    return [(span.name, span.start_ns, span.duration_ns, span.depth) for span in trace.spans]


def test_alone_on_the_server() -> None:
    trace = trace_of(HERE, STAGES, ServerTime(1, 94, 8, False))
    assert shape(trace) == [
        ("request", 0, 130, 0),
        ("pack", 0, 10, 1),
        ("round trip", 10, 100, 1),
        ("connection", 10, 6, 2),
        ("server", 13, 94, 2),
        ("Triton's queue", 13, 8, 3),
        ("decode", 21, 10, 3),
        ("preprocess", 31, 5, 3),
        ("engine", 36, 60, 3),
        ("postprocess", 96, 5, 3),
        ("rest of the server", 101, 6, 3),
        ("unpack", 110, 20, 1),
    ]
    assert (trace.is_cached, trace.note) == (False, "")
    assert [span.name for span in trace.spans if span.is_placed] == ["request", "pack", "round trip", "unpack"]


def test_a_server_that_counts_beyond_its_answer_leaves_the_connection_unknown() -> None:
    trace = trace_of(HERE, STAGES, ServerTime(1, 105, 8, False))
    names = [span.name for span in trace.spans]
    assert names[3:] == ["server", "Triton's queue", *STAGES, "rest of the server", "unpack"]
    assert within(trace, 2) == within(trace, 3) == trace["server"].duration_ns == 100
    assert "beyond its answer" in trace.note


@pytest.mark.parametrize(
    ("server", "note"),
    [
        (None, ""),
        (ServerTime(0, 0, 0, False), ""),
        (ServerTime(1, 30, 3, False), ""),  # a model that has a line of its own
        (ServerTime(3, 300, 30, False), "3 requests were answered at the same time"),
    ],
)
def test_without_the_server_s_word_there_is_no_queue(server: ServerTime | None, note: str) -> None:
    trace = trace_of(HERE, STAGES, server)
    names = [span.name for span in trace.spans]
    assert names == ["request", "pack", "round trip", *STAGES, "connection, waiting", "unpack"]
    assert trace["connection, waiting"].duration_ns == 20
    assert trace.note.startswith(note)
    assert bool(trace.note) == bool(note)


def test_a_kept_answer_s_stages_are_not_this_request_s() -> None:
    trace = trace_of(HERE, STAGES, ServerTime(1, 4, 3, True))
    assert [span.name for span in trace.spans][3:-1] == ["connection", "server", "Triton's queue", "rest of the server"]
    assert trace.is_cached
    assert "cache" in trace.note
    # Also where only the times say so: they are longer than the whole.
    assert trace_of(HERE, {"engine": 101}, None).is_cached


@given(NS, NS, NS, st.lists(NS, min_size=4, max_size=4), NS, NS)
def test_it_adds_up(packed: int, trip: int, unpacked: int, stages: list[int], total: int, queue: int) -> None:
    stage_ns = dict(zip(STAGES, stages, strict=True))
    trace = trace_of(Measured(packed, trip, unpacked), stage_ns, ServerTime(1, total, queue, False))
    assert within(trace, 0) == within(trace, 1) == packed + trip + unpacked
    assert within(trace, 2) == trip
    names = [span.name for span in trace.spans]
    if "server" in names and queue + sum(stages) <= trip:
        assert within(trace, 3) == trace["server"].duration_ns
    assert within(trace_of(Measured(packed, trip, unpacked), stage_ns, None), 2) == trip


def statistics(**models: tuple[int, int, int, int]) -> dict[str, Any]:
    """Model → requests, their ns, their queue's ns, those out of the cache."""
    return {
        "model_stats": [
            {
                "name": name,
                "inference_stats": {
                    "success": {"count": count, "ns": ns},
                    "queue": {"count": count, "ns": queue_ns},
                    "cache_hit": {"count": cached},
                },
            }
            for name, (count, ns, queue_ns, cached) in models.items()
        ]
    }


def test_the_server_s_sums() -> None:
    steps = ("m_a", "m_b")
    before = sums_of(statistics(m=(5, 500, 50, 0), m_a=(5, 100, 10, 0), m_b=(4, 40, 4, 0), x=(1, 1, 1, 1)), "m", steps)
    after = sums_of(statistics(m=(6, 590, 51, 0), m_a=(6, 130, 13, 0), m_b=(5, 50, 9, 0), x=(9, 9, 9, 9)), "m", steps)
    assert server_time(before, after) == ServerTime(1, 90, 1 + 3 + 5, False)
    # A step that is not added up yet, one that others asked as well, and a whole answer out of the cache.
    late = sums_of(statistics(m=(6, 590, 51, 0), m_a=(5, 100, 10, 0), m_b=(5, 50, 9, 0)), "m", steps)
    assert server_time(before, late).requests == 0
    more = sums_of(statistics(m=(6, 590, 51, 0), m_a=(7, 160, 16, 0), m_b=(5, 50, 9, 0)), "m", steps)
    assert server_time(before, more).requests == 2
    kept = sums_of(statistics(m=(6, 501, 51, 1), m_a=(5, 100, 10, 0), m_b=(4, 40, 4, 0)), "m", steps)
    assert server_time(before, kept) == ServerTime(1, 1, 1, True)


def test_sums_as_each_protocol_has_them() -> None:
    # In JSON of gRPC, 64 bits are text, and a zero is left out.
    text = {"model_stats": [{"name": "m", "inference_stats": {"success": {"count": "6", "ns": "590"}}}, {"name": "x"}]}
    assert sums_of(text, "m") == sums_of(statistics(m=(6, 590, 0, 0)), "m")
    # Versions are added up.
    twice = {"model_stats": 2 * statistics(m=(6, 590, 1, 0))["model_stats"]}
    assert sums_of(twice, "m") == sums_of(statistics(m=(12, 1180, 2, 0)), "m")


@pytest.mark.parametrize("told", [{}, {"model_stats": 1}, {"model_stats": [{}]}, {"model_stats": [1]}])
def test_no_statistics(told: Any) -> None:
    with pytest.raises(ServerError, match="m: expected its statistics, got another JSON"):
        sums_of(told, "m")


def test_the_waterfall_is_a_line_a_span() -> None:
    trace = trace_of(HERE, STAGES, ServerTime(1, 94, 8, False))
    lines = waterfall(trace).splitlines()
    assert len(lines) == len(trace.spans)
    assert lines[0].endswith("  " + "█" * 32)
    others = waterfall(trace_of(HERE, STAGES, ServerTime(3, 1, 1, False))).splitlines()
    assert others[-1].startswith("  3 requests were answered at the same time")
    assert max(map(len, lines + others[:-1])) <= 80
    waterfall(trace_of(Measured(0, 0, 0), {}, None))  # of nothing at all


# ---- the real server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["fused", "ensemble"])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_traced(served: Callable[..., Any], photographs: list[Path], layout: str, scheme: str) -> None:
    where = served(layout)
    with client_of(where, scheme) as client:
        client(photographs[0])
        done = client.traced(photographs[0], conf=0.05, max_det=5)
        assert len(done.answer) == 5
        trace = done.trace
        assert (trace.is_cached, trace.note) == (False, "")
        for stage, ns in done.answer.stage_ns.items():
            assert trace[stage].duration_ns == ns
        if layout == "ensemble":  # Triton knows how long it was in the server
            assert (
                0 < trace["Triton's queue"].duration_ns < trace["server"].duration_ns <= trace["round trip"].duration_ns
            )
        assert within(trace, 1) == trace["request"].duration_ns
        assert within(trace, 2) == trace["round trip"].duration_ns
        with pytest.raises(ImageError):
            client.traced(b"no image")
        with pytest.raises(OptionError):
            client.traced(photographs[0], conf=7)

    async def ask() -> Trace:
        async with async_client_of(where, scheme) as other:
            return (await other.traced(photographs[0])).trace

    assert [span.name for span in asyncio.run(ask()).spans] == [span.name for span in trace.spans]


def test_on_the_command_line(served: Callable[..., Any], photographs: list[Path], tmp_path: Path) -> None:
    where, file = served("ensemble"), tmp_path / "out.json"
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    command = [sys.executable, "-m", "visionfast.cli", "client", where.http_url, where.name, *map(str, photographs)]
    done = subprocess.run(
        [*command, str(tmp_path / "bad.jpg"), "--trace", "--trace-json", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1  # of the bad one
    assert done.stdout.count("round trip") == done.stdout.count("rest of the server") == 2
    events = json.loads(file.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        f"{number}: {path}" for number, path in enumerate(photographs, 1)
    ]
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert [event["name"] for event in spans[:3]] == ["request", "pack", "round trip"]
    whole = spans[0]
    for event in spans:
        assert event["ts"] >= 0
        assert event["ts"] + event["dur"] <= whole["dur"] + 1e-3


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_other_tasks_are_traced(
    small_served: Callable[[str], Any], photographs: list[Path], tmp_path: Path, scheme: str
) -> None:
    asked = {"points": [(100, 200, 1)], "multimask": True}
    traced: list[tuple[Any, Trace]] = []
    with client_of(small_served("embed"), scheme) as client:
        for patches in (True, False):
            done = client.traced_embed(photographs[0], patches=patches, normalise=True)
            expected = client.embed(photographs[0], patches=patches, normalise=True)
            np.testing.assert_array_equal(done.answer.cls, expected.cls[0])
            assert (done.answer.patches is None) == (not patches)
            traced.append((done.answer, done.trace))
        with pytest.raises(OptionError, match="is a model for embed"):
            client.traced(photographs[0])
    with client_of(small_served("prompt"), scheme) as client:
        picture = tmp_path / "new.jpg"  # the server has it not encoded yet
        picture.write_bytes(photographs[0].read_bytes() + scheme.encode())
        first, again = (client.traced_segment(picture, **asked) for _ in range(2))
        for masks in (first.answer, again.answer):
            assert_same(masks, client.segment(picture, **asked))
        assert "encoder" in {span.name for span in first.trace.spans}
        assert "encoder" not in {span.name for span in again.trace.spans}
        everything = client.traced_everything(picture, points_per_side=2)
        assert_same(everything.answer, client.everything(picture, points_per_side=2))
        traced += [(done.answer, done.trace) for done in (first, again, everything)]
        with pytest.raises(OptionError):
            client.traced_segment(picture, points=[(-1, 0, 1)])
    for answer, trace in traced:
        assert (trace.is_cached, trace.note) == (False, "")
        assert {span.name for span in trace.spans} >= set(answer.stage_ns)
        assert within(trace, 1) == trace["request"].duration_ns
        assert within(trace, 2) == trace["round trip"].duration_ns

    async def ask() -> tuple[Any, ...]:
        async with async_client_of(small_served("embed"), scheme) as other:
            vectors = await other.traced_embed(photographs[0], normalise=True)
        async with async_client_of(small_served("prompt"), scheme) as other:
            return (
                vectors,
                await other.traced_segment(picture, **asked),
                await other.traced_everything(picture, points_per_side=2),
            )

    vectors, masks, everything = asyncio.run(ask())
    np.testing.assert_array_equal(vectors.answer.cls, traced[0][0].cls)
    assert_same(masks.answer, first.answer)
    assert [span.name for span in masks.trace.spans] == [span.name for span in again.trace.spans]
    assert_same(everything.answer, traced[-1][0])


@pytest.mark.parametrize(
    ("name", "options"),
    [("embed", ()), ("prompt", ("--box", "10,20,300,400")), ("prompt", ("--everything",))],
)
def test_other_tasks_on_the_command_line(
    small_served: Callable[[str], Any], photographs: list[Path], tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    where, file = small_served(name), tmp_path / "out.json"
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    if "--everything" in options:
        options = (*options, "--points-per-side", "2")
    sources = [str(photographs[0]), str(tmp_path / "bad.jpg"), str(photographs[1])]
    command = [sys.executable, "-m", "visionfast.cli", "client", where.http_url, where.name, *sources, *options]
    command += ["--trace", "--trace-json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr  # of the bad one
    lines = done.stdout.splitlines()
    told = [next((name for name in ("bus.jpg", "zidane.jpg", "round trip") if name in line), "") for line in lines]
    assert [one for one in told if one] == ["bus.jpg", "round trip", "zidane.jpg", "round trip"]
    named = [event["args"]["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "M"]
    assert named == [f"{number}: {path}" for number, path in enumerate(photographs, 1)]


def test_events_are_those_of_the_trace() -> None:
    trace = trace_of(HERE, STAGES, ServerTime(1, 94, 8, False))
    events = chrome_events({"a": trace, "b": trace})["traceEvents"]
    assert {event["tid"] for event in events} == {1, 2}
    engine = next(event for event in events if event["name"] == "engine")
    assert (engine["ts"], engine["dur"]) == (0.036, 0.060)


def test_steps() -> None:
    assert steps_of({}) == ()
    assert steps_of({"ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]}}) == ("a", "b")
