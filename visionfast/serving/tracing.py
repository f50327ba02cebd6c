"""Where one request's time went, seen from its client.

No clock is compared with another one's. What the client does is measured here; what the server does are durations by
its own clocks. The stages' come with the answer. How long the request was in the server, and waited in Triton's queues,
is how much Triton's own sums (its statistics) rose meanwhile, which is this request's alone if they rose by one. Triton
does not know it of a single model whose requests wait in a line of ours (`stages.in_line`): for that they are done when
they are in the line. Where exactly within the round trip a duration lies is not known; spans are placed in the order of
the way, with half of the connection's share in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from visionfast.errors import ServerError

__all__ = [
    "Measured",
    "ServerTime",
    "Span",
    "Sums",
    "Trace",
    "Traced",
    "chrome_events",
    "server_time",
    "steps_of",
    "sums_of",
    "trace_of",
]

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Span:
    """One part of the way.

    Attributes:
        name: what was done.
        start_ns: from when the client began.
        duration_ns: of it.
        depth: 0 for the whole; a span lies within the one before it that is less deep.
        is_placed: `start_ns` was measured; else only the duration was, and its place is the way's order.
    """

    name: str
    start_ns: int
    duration_ns: int
    depth: int
    is_placed: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """A request's.

    Attributes:
        spans: in the order of the way. Those of one depth within another one add up to it.
        is_cached: the server's response cache answered: nothing was computed.
        note: one line on what could not be told; empty where nothing is missing.
    """

    spans: tuple[Span, ...]
    is_cached: bool
    note: str

    def __getitem__(self, name: str) -> Span:
        for span in self.spans:
            if span.name == name:
                return span
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Traced(Generic[_Answer]):
    """An answer and its trace."""

    answer: _Answer
    trace: Trace


@dataclass(frozen=True, slots=True)
class Measured:
    """By the client's clock, nanoseconds.

    Attributes:
        packed_ns: to read the image and put the request together.
        round_trip_ns: from sending it until its answer was here.
        unpacked_ns: to read the answer.
    """

    packed_ns: int
    round_trip_ns: int
    unpacked_ns: int


@dataclass(frozen=True, slots=True)
class ServerTime:
    """By the server's clock.

    Attributes:
        requests: that were answered between the two looks at its sums. 0: it has not added them up yet. If more than
            one, the times are of all of them.
        total_ns: in the server, from its queue to its answer.
        queue_ns: of it, waiting, at all steps.
        is_cached: its response cache answered.
    """

    requests: int
    total_ns: int
    queue_ns: int
    is_cached: bool


def steps_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The models that a model's configuration sends its requests on to; none where it is no ensemble."""
    return tuple(step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", ()))


Sums: TypeAlias = Mapping[str, Mapping[tuple[str, str], int]]
"""Model → what the server added up for it: requests answered, their nanoseconds, …"""

_SUMS = (("success", "count"), ("success", "ns"), ("queue", "ns"), ("cache_hit", "count"))


def sums_of(statistics: Mapping[str, Any], model: str, steps: Sequence[str] = ()) -> Sums:
    """Out of the server's statistics.

    Args:
        statistics: as Triton has them in JSON: `{"model_stats": [{"name": …, "inference_stats": …}, …]}`.
        model: that was asked.
        steps: of it, if it is an ensemble.

    Raises:
        ServerError: these are no statistics.
    """
    try:
        return {part: {key: _sum(statistics, part, *key) for key in _SUMS} for part in (model, *steps)}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"{model}: expected its statistics, got another JSON ({error!r})") from error


def _sum(statistics: Mapping[str, Any], model: str, what: str, unit: str) -> int:
    # Over the versions. In JSON of gRPC's messages, 64-bit numbers are text, and zeros are left out.
    return sum(
        int(one.get("inference_stats", {}).get(what, {}).get(unit, 0))
        for one in statistics["model_stats"]
        if one["name"] == model
    )


def server_time(before: Sums, after: Sums) -> ServerTime:
    """What the sums rose by; the first model is the one that was asked."""
    rise = {part: {key: after[part][key] - before[part][key] for key in _SUMS} for part in after}
    model, *steps = rise.values()
    is_cached = model["cache_hit", "count"] > 0
    counts = [part["success", "count"] for part in ([model] if is_cached else [model, *steps])]
    return ServerTime(
        max(counts) if min(counts) > 0 else 0,
        model["success", "ns"],
        sum(part["queue", "ns"] for part in rise.values()),
        is_cached,
    )


def trace_of(measured: Measured, stage_ns: Mapping[str, int], server: ServerTime | None) -> Trace:
    """The way of a request.

    Args:
        measured: here.
        stage_ns: of the answer.
        server: over there; `None` where its statistics did not say.
    """
    packed, trip = measured.packed_ns, measured.round_trip_ns
    spans = [
        Span("request", 0, packed + trip + measured.unpacked_ns, 0, True),
        Span("pack", 0, packed, 1, True),
        Span("round trip", packed, trip, 1, True),
    ]
    alone = server is not None and server.requests == 1
    # An answer out of the cache tells of when it was computed.
    is_cached = (server is not None and alone and server.is_cached) or sum(stage_ns.values()) > trip
    stages = {} if is_cached else dict(stage_ns)
    note = ""
    # A model that takes requests in and answers later is done with them, by Triton's sums, when it has taken them in.
    if server is not None and alone and server.total_ns >= server.queue_ns + sum(stages.values()):
        # Triton 2.51 counts until its sender is through, which is up to a millisecond after the answer is here.
        server_ns = min(server.total_ns, trip)
        way = trip - server_ns
        if way:
            spans.append(Span("connection", packed, way, 2, False))
        else:
            note = "the server counted beyond its answer: the connection is within the rest of the server"
        start = packed + way // 2
        spans.append(Span("server", start, server_ns, 2, False))
        spans += _in_a_row(start, server_ns, {"Triton's queue": server.queue_ns, **stages}, "rest of the server", 3)
    else:
        if server is not None and server.requests > 1:
            note = (
                f"{server.requests} requests were answered at the same time: how long this one was in the server is "
                "not known"
            )
        spans += _in_a_row(packed, trip, stages, "connection, waiting", 2)
    spans.append(Span("unpack", packed + trip, measured.unpacked_ns, 1, True))
    if is_cached:
        note = "answered from the server's response cache: nothing was computed"
    return Trace(tuple(spans), is_cached, note)


def _in_a_row(start_ns: int, total_ns: int, parts: Mapping[str, int], rest: str, depth: int) -> list[Span]:
    """The parts one after the other, and what is left of the total at the end."""
    spans, at = [], start_ns
    for name, duration_ns in {**parts, rest: max(0, total_ns - sum(parts.values()))}.items():
        spans.append(Span(name, at, duration_ns, depth, False))
        at += duration_ns
    return spans


def chrome_events(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Traces by a name, as the JSON that chrome://tracing and ui.perfetto.dev open: one below the other, each from 0.

    The format is Chrome's Trace Event Format: complete events (`"ph": "X"`), microseconds.
    """
    events: list[dict[str, Any]] = []
    for thread, (name, trace) in enumerate(traces.items(), 1):
        events.append({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}})
        for span in trace.spans:
            if span.name == "connection":
                continue  # what is left and right of "server" in "round trip"
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": thread,
                    "name": span.name,
                    "ts": span.start_ns / 1e3,
                    "dur": span.duration_ns / 1e3,
                    "args": {"place": "measured" if span.is_placed else "by the order of the way"},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"notes": [t.note for t in traces.values()]}}
