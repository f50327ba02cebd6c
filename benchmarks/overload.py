"""Does a server that is asked for three times what it can do still do what it can, and the urgent part as if alone?

On one machine in one run, the load generator (`open_loop.py`, a process of its own) beside the server: how many images
a second it answers at most (clients that ask one after the other), then the online requests alone, then both kinds
together at three times that rate. Arrivals are Poisson's, every request is a whole encoded image with a deadline, and
its latency counts from when it was due.

    .venv/bin/python benchmarks/overload.py --weights yolov8n.pt --json overload.raw.json

Goodput is what was answered in time, a second of the whole phase, until its last answer. The generator's share of the
processors is reported: the server does without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from interleaved import QUIET, console, environment, write_results  # before torch
from rich.table import Table

from visionfast import machine
from visionfast.bench.load import OtherLoad
from visionfast.bench.statistics import percentile
from visionfast.build import build
from visionfast.certify import default_images
from visionfast.errors import VisionfastError
from visionfast.serving.repository import deploy
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.server import Server

LEVELS = ("online", "offline")
CLIENTS = 8  # of the closed loop
GRACE_MS = 50
"""That an outcome may come after its deadline: the client's own clock, and the way back."""

Arrivals: TypeAlias = list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Phase:
    """What was asked for and what came of it; a row a request.

    Attributes:
        level: of `LEVELS`.
        outcome: of `open_loop.OUTCOMES`.
        latency_ns: from when it was due.
        lag_ns: how late it was sent.
        seconds: that it took.
        generator_share: of all processors, the generator's.
        others: share of the processors that went to anyone but the server and its clients.
    """

    level: Sequence[str]
    outcome: Sequence[str]
    latency_ns: Sequence[int]
    lag_ns: Sequence[int]
    seconds: float
    generator_share: float
    others: float

    def answered_ms(self, level: str | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Milliseconds of each answer."""
        rows = zip(self.level, self.outcome, self.latency_ns, strict=True)
        return np.array([ns / 1e6 for at, what, ns in rows if what == "answered" and level in (None, at)])

    def count(self, outcome: str, level: str) -> int:
        return sum((at, what) == (level, outcome) for at, what in zip(self.level, self.outcome, strict=True))


class Generator:
    """The generator's process, as a context manager."""

    def __init__(self, target: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("open_loop.py")), target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise VisionfastError("the load generator ended; what it said is above")
        told: dict[str, Any] = json.loads(line)
        return told

    def phase(self, what: str, levels: Sequence[str] | None = None, **arguments: Any) -> Phase:
        """One loop; `levels` of the requests where they are not all offline."""
        load = OtherLoad(children=True)  # the server and the generator are
        told = self.do(what, **arguments)
        others = load.share()
        assert others is not None, "Linux tells, and the server is for nothing else"
        asked = told["asked"]
        outcome, latency_ns, lag_ns = ([row[column] for row in asked] for column in range(3))
        return Phase(
            list(levels or ["offline"] * len(asked)),
            outcome,
            latency_ns,
            lag_ns,
            told["wall_ns"] / 1e9,
            told["cpu_ns"] / told["wall_ns"] / machine.usable_cpus(),
            others,
        )


def poisson(rates: dict[str, float], seconds: float, seed: int) -> Arrivals:
    """When and of which level; each level's arrivals are of its own rate a second and seed, whoever else comes."""
    arrivals: Arrivals = []
    for level, rate in rates.items():
        random_, due_s = random.Random(f"{seed} {level}"), 0.0
        while (due_s := due_s + random_.expovariate(rate)) < seconds:
            arrivals.append((due_s, level))
    return sorted(arrivals)


@contextlib.contextmanager
def generator(folder: Path, layout: str, arguments: argparse.Namespace) -> Iterator[Generator]:
    """The pipeline served in one layout, and the generator that asks it."""
    scheduling = Scheduling() if arguments.max_batch is None else Scheduling(max_batch=arguments.max_batch)
    pipeline = deploy(folder, name=f"overload-{layout}", layout=layout, scheduling=scheduling, uncertified=True)  # type: ignore[arg-type]
    deadline_ms = {"online": arguments.online_deadline_ms, "offline": arguments.offline_deadline_ms}
    with (
        Server(pipeline, http=0, grpc=0, metrics=0) as server,
        Generator(server.grpc_url.removeprefix("grpc://")) as made,
    ):
        made.do("prepare", model=pipeline.name, images=list(map(str, default_images())), deadline_ms=deadline_ms)
        made.phase("closed_loop", clients=CLIENTS, seconds=3, level="offline")  # warm, and the line has seen batches
        yield made


def measure(made: Generator, arguments: argparse.Namespace) -> tuple[float, Phase, Phase, Phase]:
    """Images a second at most; that, the online requests alone, and both at `factor` times as many."""
    closed = made.phase("closed_loop", clients=CLIENTS, seconds=arguments.capacity_seconds, level="offline")
    capacity = closed.outcome.count("answered") / closed.seconds
    if not capacity:
        raise VisionfastError(f"no request of {CLIENTS} clients one after the other was answered; what failed is above")
    online = {"online": arguments.online_share * capacity}
    alone = poisson(online, arguments.seconds, arguments.seed)
    unloaded = made.phase("open_loop", [level for _, level in alone], arrivals=alone)
    both = poisson(
        online | {"offline": arguments.factor * capacity - online["online"]}, arguments.seconds, arguments.seed
    )
    overloaded = made.phase("open_loop", [level for _, level in both], arrivals=both)
    return capacity, closed, unloaded, overloaded


# ---- the report ---------------------------------------------------------------------------------------------------


def goals(
    capacity: float, unloaded: Phase, overloaded: Phase, arguments: argparse.Namespace
) -> Iterator[tuple[str, float, str, bool]]:
    """Issue 6's: what, the figure, its bound, and whether it holds."""
    goodput = len(overloaded.answered_ms()) / overloaded.seconds
    yield "goodput / capacity", goodput / capacity, "≥ 0.9", goodput >= 0.9 * capacity
    deadline_ms = {"online": arguments.online_deadline_ms, "offline": arguments.offline_deadline_ms}
    rows = zip(overloaded.level, overloaded.outcome, overloaded.latency_ns, strict=True)
    over = sum(what == "failed" or ns / 1e6 > deadline_ms[at] + GRACE_MS for at, what, ns in rows)
    yield f"requests without an outcome {GRACE_MS} ms after their deadline", over, "0", not over
    before, after = (percentile(phase.answered_ms("online"), 95).value for phase in (unloaded, overloaded))
    yield "online P95 / its unloaded value", after / before, "≤ 1.5", after <= 1.5 * before  # NaN: nothing was answered
    lost = 1 - overloaded.count("answered", "online") / max(1, overloaded.level.count("online"))
    yield "online requests refused or late, %", 100 * lost, "≤ 1", lost <= 0.01


def report(layout: str, capacity: float, closed: Phase, unloaded: Phase, overloaded: Phase, held: Any) -> None:
    console.print(f"\n[bold]{layout}[/]: {capacity:.1f} images a second, {CLIENTS} clients one after the other")
    table = Table("", "n", "answered", "queue", "time", "given up", "P50 ms", "P95 ms", "P99 ms", box=None)
    for name, phase in (("alone", unloaded), ("overload", overloaded)):
        for level in LEVELS:
            if not (n := phase.level.count(level)):
                continue
            answered = phase.answered_ms(level)
            points = [percentile(answered, percent).value for percent in (50, 95, 99)]
            refused = (phase.count(what, level) for what in ("refused: queue", "refused: time", "given up"))
            row = (str(n), str(len(answered)), *map(str, refused), *(f"{p:.0f}" for p in points))
            table.add_row(f"{name}, {level}", *row)
    console.print(table)
    lag_ms = percentile(overloaded.lag_ns, 99).value / 1e6
    console.print(
        f"the generator took {overloaded.generator_share:.1%} of the processors; sent late by {lag_ms:.1f} ms"
    )
    disturbed = max(phase.others for phase in (closed, unloaded, overloaded))
    table = Table("goal", "measured", "bound", "holds", box=None)
    for what, value, bound, holds in held:
        shown = "no verdict" if disturbed > QUIET else "[green]yes[/]" if holds else "[red]no[/]"
        table.add_row(what, f"{value:.2f}", bound, shown)
    console.print(table)
    end = "; above 3 % no goal is judged" if disturbed > QUIET else ""
    console.print(f"others took up to {disturbed:.0%} of the processors{end}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--weights", type=Path, help="a YOLOv8 detection checkpoint")
    given.add_argument("--engine", type=Path, help="its engine's folder, built before")
    parser.add_argument("--layouts", nargs="+", default=["fused", "ensemble"], choices=["fused", "ensemble"])
    parser.add_argument("--seconds", type=float, default=60, help="of the load, alone and over")
    parser.add_argument("--capacity-seconds", type=float, default=20, help="of the clients one after the other")
    parser.add_argument("--factor", type=float, default=3, help="of the capacity, that is asked for")
    parser.add_argument("--online-share", type=float, default=0.2, help="of the capacity, that is asked for online")
    parser.add_argument("--online-deadline-ms", type=float, default=500)
    parser.add_argument("--offline-deadline-ms", type=float, default=1000)
    parser.add_argument("--max-batch", type=int, help="of the deployment; default: deploy's")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--json", type=Path, help="raw samples and environment go here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a goal is missed")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    before = environment()
    every, results = True, []
    with tempfile.TemporaryDirectory(prefix="visionfast-") as home:
        os.environ["VISIONFAST_HOME"] = home
        folder = arguments.engine or build(arguments.weights.resolve(), backend="openvino")[0]
        for layout in arguments.layouts:
            with generator(folder.resolve(), layout, arguments) as made:
                capacity, closed, unloaded, overloaded = measure(made, arguments)
            phases = {"closed": closed, "alone": unloaded, "overload": overloaded}
            results.append({"layout": layout, "capacity": capacity, "phases": {k: _raw(v) for k, v in phases.items()}})
            if arguments.json:  # after every layout, and before anything is made of it
                write_results(arguments.json, "overload", arguments, before, results)
            held = list(goals(capacity, unloaded, overloaded, arguments))
            report(layout, capacity, closed, unloaded, overloaded, held)
            every &= max(phase.others for phase in phases.values()) > QUIET or all(holds for *_, holds in held)
    return 1 if arguments.strict and not every else 0


def _raw(phase: Phase) -> dict[str, Any]:
    return {name: getattr(phase, name) for name in Phase.__slots__}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
