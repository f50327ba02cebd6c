"""One measuring run: systems by turns in rounds of a random order, until the time is over; a `Record` comes out."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from time import monotonic, perf_counter_ns
from typing import TypeAlias

import numpy as np

from visionfast import machine
from visionfast.bench.environment import environment
from visionfast.bench.inputs import distinct
from visionfast.bench.load import OtherLoad
from visionfast.bench.records import SCENARIOS, Input, Record, Samples, Scenario
from visionfast.bench.scenarios import (
    EncodedOf,
    Row,
    arrivals_ns,
    multi_stream,
    offline,
    samples_of,
    server,
    single_stream,
)
from visionfast.bench.server_rate import highest_rate, keeps
from visionfast.bench.statistics import percentile, samples_needed
from visionfast.bench.systems import NullSystem, SystemUnderTest
from visionfast.errors import OptionError
from visionfast.whole_numbers import MAX_THREADS, checked_whole

__all__ = ["Progress", "harness_ns", "measure"]

Progress = Callable[[str], None]

_Blocks: TypeAlias = list[tuple[int, list[Row]]]
"""The number of a round, and its requests."""

_FEWEST_ROUNDS, _ROUNDS = 12, 24  # how many fit; at least 8 are made, however long they take
"""A slow system is asked about fewer images so that there are so many rounds; a quick one more often in each."""

_SERVER_ROUNDS = 8
"""Longer ones: a queue takes its time to become what it is."""

_BOUND_OF_P90 = 3.0
"""The latency that a server may have where none is named, in P90s of an image by itself."""


def measure(
    systems: Sequence[SystemUnderTest],
    inputs: Sequence[Input],
    *,
    scenarios: Sequence[Scenario] = SCENARIOS,
    seconds: float = 20.0,
    streams: int | None = None,
    rate_per_s: float | None = None,
    bound_ms: float | None = None,
    warmup: int = 3,
    seed: int = 0,
    all_inputs: bool = False,
    command: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Record:
    """Measures systems side by side.

    A round takes every system once, in a new random order, on the same inputs. A system of kind `control` is asked for
    one image at a time in every scenario; who is `null`, `bare` or `control` is not asked in `server`, but for the
    control between the others' turns.

    Args:
        systems: open, of different keys.
        inputs: at least one.
        scenarios: to run, one after the other.
        seconds: of each, for all systems together.
        streams: requests at a time in all but `single-stream`; default: one a processor.
        rate_per_s: of `server`; default: the highest that keeps the bound is looked for, for each system.
        bound_ms: latency that at most 1 % of the requests of `server` may exceed; default: three times the P90 that
            the system has in single-stream, which is asked for that where it is not among the scenarios. A system that
            answers nothing there has none, and is left out of `server`.
        warmup: untimed requests of each system at the beginning.
        seed: of the orders and of the arrivals.
        all_inputs: ask about all inputs, also where a slow system has only few rounds then.
        command: for the record.
        progress: is told what comes next.

    Raises:
        OptionError: an option is out of its range, or two systems have one key.
        BackendError: and whatever else a system raises that is not about one image.
    """
    keys = [system.system.key for system in systems]
    if not systems or len(set(keys)) < len(keys) or not inputs:
        raise OptionError(f"measure: expected systems of different keys and an input, got {', '.join(keys) or 'none'}")
    for what, value in (
        ("seconds", seconds),
        ("warmups", warmup),
        ("requests a second", rate_per_s),
        ("milliseconds of the bound", bound_ms),
    ):
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"measure: expected more than 0 {what}, got {value:g}")
    streams = _checked_streams(streams)
    tell = progress or (lambda text: None)
    load, before = OtherLoad(), environment()
    tell("harness")
    harness = harness_ns(streams, [s for s in SCENARIOS if s in scenarios])
    tell("warm-up")
    alone_ns = {s.system.key: _warmed(s, inputs, max(2, warmup)) for s in systems}
    if not all_inputs:
        inputs = inputs[: max(1, int(seconds * 1e9 / _FEWEST_ROUNDS / sum(alone_ns.values())) - 1)]  # 1: untimed
    # Once about each: what is asked for again later has been seen then, and what a picture costs is known.
    alone_ns = {s.system.key: _warmed(s, inputs, len(inputs)) for s in systems}
    run = _Run(systems, inputs, alone_ns, seconds, streams, seed)
    samples: dict[tuple[str, Scenario], Samples] = {}
    for scenario in scenarios:
        tell(scenario)
        found = run.server(rate_per_s, bound_ms, samples, tell) if scenario == "server" else run.rounds(scenario)
        samples |= {(key, scenario): taken for key, taken in found.items()}
    return Record(
        version=1,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=dict(command or {}),
        environment=before,
        systems=tuple(system.system for system in systems),
        inputs=tuple(inputs),
        samples=samples,
        others_cpu_share=load.share(),
        harness_ns=harness,
    )


def harness_ns(streams: int | None, scenarios: Sequence[Scenario], *, requests: int = 1000) -> dict[Scenario, int]:
    """What the harness takes of a request, in each scenario, nanoseconds: of a system that answers at once.

    Where requests follow one another it is what they take in all; where several are under way, the median of their
    latency, in which a thread has to wake up.

    Raises:
        OptionError: `streams` is out of its range.
    """
    streams, null = _checked_streams(streams), NullSystem()
    order = [0] * requests
    found: dict[Scenario, int] = {}
    for scenario in scenarios:
        started = perf_counter_ns()
        if scenario == "single-stream":
            rows = single_stream(null.call, order, _nothing)
        elif scenario == "multi-stream":
            rows = multi_stream(null.parallel(streams), order, _nothing)
        elif scenario == "offline":
            rows = offline(null.parallel(streams), order, _nothing)
        else:
            rows = server(null.parallel(streams), order, arrivals_ns(requests, 2 * requests, 0), _nothing)
        spent = perf_counter_ns() - started
        waited = scenario in ("multi-stream", "server")
        latency = percentile([row.done_ns - row.due_ns for row in rows], 50).value
        found[scenario] = int(latency) if waited else spent // len(rows)
    return found


def _checked_streams(streams: int | None) -> int:
    """Requests at a time, each on a thread of its own; one a processor where nothing is said."""
    return machine.usable_cpus() if streams is None else checked_whole("streams", streams, MAX_THREADS)


def _nothing(number: int) -> bytes:
    return b""


def _warmed(system: SystemUnderTest, inputs: Sequence[Input], count: int) -> float:
    """Asks so often; nanoseconds of a request, the mean of the second half."""
    order = [i % len(inputs) for i in range(count)]
    rows = single_stream(system.call, order, _encoded_of(system, inputs))
    return max(1.0, float(np.mean([row.done_ns - row.begun_ns for row in rows[count // 2 :]])))


def _encoded_of(system: SystemUnderTest, inputs: Sequence[Input]) -> EncodedOf:
    if system.caches:
        # From the clock: no number comes again, in whatever block, as long as the system's cache lives.
        numbers = itertools.count(perf_counter_ns())
        return lambda index: distinct(inputs[index].encoded, next(numbers))
    return lambda index: inputs[index].encoded


@dataclass(frozen=True, slots=True)
class _Run:
    systems: Sequence[SystemUnderTest]
    inputs: Sequence[Input]
    alone_ns: Mapping[str, float]
    seconds: float
    streams: int
    seed: int

    def rounds(self, scenario: Scenario) -> dict[str, Samples]:
        """All systems by turns."""
        blocks: dict[str, _Blocks] = {s.system.key: [] for s in self.systems}
        asked = {s.system.key: self._asked(s, scenario) for s in self.systems}
        repeats = int(self.seconds * 1e9 / _ROUNDS / (sum(self.alone_ns.values()) * len(self.inputs)))
        count = max(1, repeats) * len(self.inputs)
        if scenario != "single-stream":  # as many for each thread: one that is over would be all threads' time
            count = -(-count // self.streams) * self.streams
        shuffled = random.Random(f"{self.seed} {scenario}")
        began = monotonic()
        for number in itertools.count():
            if number >= 8 and monotonic() - began > self.seconds:
                break
            order = self._order(shuffled, count)
            for key in shuffled.sample(list(asked), len(asked)):
                blocks[key].append((number, asked[key](order)))
        return {
            key: samples_of(taken, {"parallel": 1 if scenario == "single-stream" else self.streams})
            for key, taken in blocks.items()
        }

    def server(
        self,
        rate_per_s: float | None,
        bound_ms: float | None,
        samples: Mapping[tuple[str, Scenario], Samples],
        tell: Progress,
    ) -> dict[str, Samples]:
        """Every system at its own rate, the control in between."""
        controls = [s for s in self.systems if s.system.kind == "control"]
        asked = [s for s in self.systems if s.system.kind not in ("control", "null", "bare")]
        blocks: dict[str, _Blocks] = {s.system.key: [] for s in (*asked, *controls)}
        settings: dict[str, dict[str, float]] = {}
        for index, system in enumerate(asked):
            key = system.system.key
            first = index * _SERVER_ROUNDS  # no two systems share a round: each has its own arrivals
            bound = bound_ms if bound_ms is not None else self._bound_ms(system, samples)
            if math.isnan(bound):
                tell(f"server, {key}: left out: no request was answered in single-stream, so there is no bound")
                del blocks[key]
                continue
            rate = rate_per_s
            if rate is None:
                rate = self._found_rate(system, bound, tell)
            tell(f"server, {key} at {rate:.3g}/s")
            taken, beside = self._served(system, rate, controls, first)
            if rate_per_s is None and not keeps(samples_of(taken, {}), bound * 1e6):
                rate *= 0.9  # the search's windows are short, and this one is what counts
                tell(f"server, {key} at {rate:.3g}/s: the rate before did not keep its bound for so long")
                taken, beside = self._served(system, rate, controls, first)
            blocks[key] = taken
            for control, rows in beside.items():
                blocks[control] += rows
            settings[key] = {"parallel": self.streams, "rate_per_s": rate, "bound_ms": bound}
        return {key: samples_of(rows, settings.get(key, {"parallel": 1})) for key, rows in blocks.items()}

    def _served(
        self, system: SystemUnderTest, rate: float, controls: Sequence[SystemUnderTest], first: int
    ) -> tuple[_Blocks, dict[str, _Blocks]]:
        calls = system.parallel(self.streams)
        shuffled = random.Random(f"{self.seed} server")
        blocks: _Blocks = []
        beside: dict[str, _Blocks] = {c.system.key: [] for c in controls}
        count = max(len(self.inputs), int(rate * self.seconds / _SERVER_ROUNDS))
        for number in range(first, first + _SERVER_ROUNDS):
            order = self._order(shuffled, count)
            due_ns = arrivals_ns(count, rate, shuffled.randrange(2**31))
            blocks.append((number, server(calls, order, due_ns, self._bytes(system))))
            for control in controls:
                order = self._order(shuffled, 2 * len(self.inputs))
                beside[control.system.key].append((number, single_stream(control.call, order, self._bytes(control))))
        return blocks, beside

    def _found_rate(self, system: SystemUnderTest, bound_ms: float, tell: Progress) -> float:
        calls = system.parallel(self.streams)
        shuffled = random.Random(f"{self.seed} rate")

        def window(rate: float, seconds: float) -> Samples:
            tell(f"server, {system.system.key}: does {rate:.3g}/s keep {bound_ms:.4g} ms?")
            count = max(len(self.inputs), int(rate * seconds))
            order = self._order(shuffled, count)
            due_ns = arrivals_ns(count, rate, shuffled.randrange(2**31))
            return samples_of([(0, server(calls, order, due_ns, self._bytes(system)))], {})

        rows = offline(calls, self._order(shuffled, max(len(self.inputs), 4 * len(calls))), self._bytes(system))
        wall_s = (max(row.done_ns for row in rows) - min(row.begun_ns for row in rows)) / 1e9
        return highest_rate(window, len(rows) / wall_s, bound_ms * 1e6, self.seconds)

    def _bound_ms(self, system: SystemUnderTest, samples: Mapping[tuple[str, Scenario], Samples]) -> float:
        """NaN where nothing was answered."""
        key = system.system.key
        alone = samples.get((key, "single-stream"))
        if alone is None:
            fitting = int(self.seconds * 1e9 / self.alone_ns[key])
            count = max(len(self.inputs), min(fitting, samples_needed(90)))
            order = self._order(random.Random(f"{self.seed} bound"), count)
            alone = samples_of([(0, single_stream(system.call, order, self._bytes(system)))], {})
        return _BOUND_OF_P90 * percentile(alone.answered.latency_ns, 90).value / 1e6

    def _asked(self, system: SystemUnderTest, scenario: Scenario) -> Callable[[Sequence[int]], list[Row]]:
        encoded_of = self._bytes(system)
        if scenario == "single-stream" or system.system.kind == "control":
            return lambda order: single_stream(system.call, order, encoded_of)
        calls = system.parallel(self.streams)
        together = multi_stream if scenario == "multi-stream" else offline
        return lambda order: together(calls, order, encoded_of)

    def _bytes(self, system: SystemUnderTest) -> EncodedOf:
        return _encoded_of(system, self.inputs)

    def _order(self, shuffled: random.Random, count: int) -> list[int]:
        """`count` inputs' numbers, each as often as the others but for one, in a random order within each pass."""
        passes = -(-count // len(self.inputs))
        order = [i for _ in range(passes) for i in shuffled.sample(range(len(self.inputs)), len(self.inputs))]
        return order[:count]
