"""Is anything left behind? A server under mixed load for half an hour, and every process of it watched.

Both layouts and a cached one, over HTTP and gRPC, sync and async; photographs, thumbnails, pictures of all shapes, and
what is no picture; clients that stay and clients that come and go; and every few minutes a new version is deployed and
the server ended and started, as that is how a version gets loaded. Memory, threads and file descriptors of the server,
each stage and the clients, and the shared memory, are sampled every second; after the warm-up they must be flat: the
slope's confidence interval against a bound (`flatness`).

    .venv/bin/python benchmarks/soak.py --weights yolov8n.pt --minutes 30 --json soak.raw.json
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatness import FIGURES, Series, Trend, read_process, shared_memory_bytes, trend
from soak_load import Asked, Load, mixed_images

from visionfast.errors import VisionfastError
from visionfast.serving.ensemble import Layout
from visionfast.serving.repository import deploy
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.server import Server

__all__ = ["Plan", "Soak", "bound_of", "soak"]

BOUNDS: Mapping[str, float] = {"threads": 1.0, "descriptors": 3.0}
"""Growth over the whole run that counts as none."""
RSS_SHARE, RSS_BYTES, SHM_BYTES = 0.03, 8 << 20, 16 << 20
"""The same of memory: 3 %, at least 8 MiB; of shared memory, which Triton never gives back, and where what lies between
two images may be a gap that the next one does not fit into."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how much, and what happens on the way.

    Attributes:
        seconds: that the server is watched, in all its lives; starts and the first requests are not counted.
        rate: images a second, Poisson arrivals.
        restarts: times that a version is deployed and the server started anew.
        warm_up_s: of each life of the server, left out.
        sample_s: between samples.
        seed: of what is asked when.
    """

    seconds: float
    rate: float
    restarts: int
    warm_up_s: float
    sample_s: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class Soak:
    """What was seen.

    Attributes:
        series: (process, figure) → over time; `shared memory` is a process of its own.
        outcomes: what came of the requests.
        restarts_s: how long each restart took.
    """

    series: dict[tuple[str, str], Series] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    restarts_s: list[float] = field(default_factory=list)

    def trends(self, plan: Plan) -> dict[tuple[str, str], Trend]:
        """Of every figure that has samples enough."""
        found = {key: trend(series, warm_up_s=plan.warm_up_s) for key, series in self.series.items()}
        return {key: one for key, one in found.items() if one is not None}


def bound_of(key: tuple[str, str], seen: Trend) -> float:
    """The growth over the run that counts as none."""
    who, figure = key
    if figure in BOUNDS:
        return BOUNDS[figure]
    return SHM_BYTES if who == "shared memory" else max(RSS_BYTES, RSS_SHARE * seen.level)


# ---- watching -----------------------------------------------------------------------------------------------------


def soak(engine: Path, images: Sequence[tuple[str, bytes]], plan: Plan) -> Soak:
    """Serves the engine, and watches. It is deployed under VISIONFAST_HOME."""

    def deployed() -> list[Path]:
        layouts: tuple[Layout, ...] = ("fused", "ensemble")
        found = [deploy(engine, name=layout, layout=layout, uncertified=True) for layout in layouts]
        return [*found, deploy(engine, name="cached", scheduling=Scheduling(cache=True), uncertified=True)]

    seen = Soak()
    pipelines = deployed()
    server = Server(pipelines, http=0, grpc=0, metrics=0, cache_bytes=4 << 20)
    began = time.monotonic()
    life_s = plan.seconds / (plan.restarts + 1)
    load: Load | None = None
    server.__enter__()
    try:
        urls = {"grpc": server.grpc_url, "http": server.http_url}
        load = Load(Asked(urls, [path.name for path in pipelines], images, plan.rate, plan.seed))
        for life in range(plan.restarts + 1):
            if life:
                load.pause()
                deployed()
                stopped = time.monotonic()
                server.__exit__(None, None, None)
                server.__enter__()
                seen.restarts_s.append(time.monotonic() - stopped)
            load.warm_up()
            if life:
                time.sleep(2.0)  # requests that were under way get to know what came of them
            load.resume()
            ends = time.monotonic() + life_s
            while time.monotonic() < ends:
                _sample(seen, server, load.pid, time.monotonic() - began, life)
                time.sleep(plan.sample_s)
        seen.outcomes = load.end()
    finally:
        if load is not None:
            load.close()
        server.__exit__(None, None, None)
    return seen


def _sample(seen: Soak, server: Server, clients: int, seconds: float, life: int) -> None:
    assert server.pid is not None
    processes = {"server": server.pid, "clients": clients} | {stage.name: stage.pid for stage in server.stages}
    for name, pid in processes.items():
        if (told := read_process(pid)) is None:
            raise VisionfastError(f"{name} (process {pid}) is gone; {server.fault()} (log: {server.log})")
        for figure in FIGURES:
            # The clients' process lives on when the server starts anew.
            its_life = 0 if name == "clients" else life
            seen.series.setdefault((name, figure), Series()).add(seconds, told[figure], its_life)
    # The names of its regions begin with the folder's that it was started in.
    mapped = shared_memory_bytes(f"{Path(f'/proc/{server.pid}/cwd').resolve().name}-")
    seen.series.setdefault(("shared memory", "bytes"), Series()).add(seconds, mapped, life)


# ---- the report ---------------------------------------------------------------------------------------------------


def report(seen: Soak, plan: Plan) -> bool:
    """Prints the table; whether nothing grows, and nothing happened that must not."""
    from interleaved import console
    from rich.table import Table

    good = True
    table = Table("process", "figure", "mean", "growth", "95 % from", "to", "bound", "verdict", box=None)
    for key, one in sorted(seen.trends(plan).items()):
        bound = bound_of(key, one)
        scale, unit = (2**20, "MiB") if "bytes" in key[1] else (1, "")
        verdict = one.verdict(bound)
        good &= verdict == "flat"
        figures = (one.level, one.growth, one.low, one.high, bound)
        table.add_row(key[0], f"{key[1].split('_')[0]} {unit}", *(f"{f / scale:.2f}" for f in figures), verdict)
    console.print(table)
    console.print(", ".join(f"{what}: {n}" for what, n in sorted(seen.outcomes.items())))
    if seen.restarts_s:
        console.print(f"restarts, s: {', '.join(f'{s:.1f}' for s in seen.restarts_s)}")
    forbidden = ("server error", "a good image was refused", "a bad image was answered")
    return good and not any(seen.outcomes[what] for what in forbidden)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--weights", type=Path, help="a YOLOv8 detection checkpoint")
    given.add_argument("--engine", type=Path, help="its engine's folder, built before")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=5, help="images a second")
    parser.add_argument("--restarts", type=int, default=3, help="times that a version is deployed and loaded")
    parser.add_argument("--warm-up-seconds", type=float, default=120, help="of each life of the server, left out")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked when")
    parser.add_argument("--json", type=Path, help="raw samples and environment go here")
    return parser.parse_args()


def main() -> int:
    from interleaved import environment, write_results

    from visionfast.build import build
    from visionfast.certify import default_images

    arguments = _arguments()
    before = environment()
    plan = Plan(
        arguments.minutes * 60, arguments.rate, arguments.restarts, arguments.warm_up_seconds, seed=arguments.seed
    )
    with tempfile.TemporaryDirectory(prefix="visionfast-") as home:
        os.environ["VISIONFAST_HOME"] = home
        folder = arguments.engine or build(arguments.weights.resolve(), backend="openvino")[0]
        images = mixed_images([path.read_bytes() for path in default_images()], plan.seed)
        seen = soak(folder.resolve(), images, plan)
    good = report(seen, plan)
    if arguments.json:
        series = [
            {"process": who, "figure": what, **dataclasses.asdict(one)} for (who, what), one in seen.series.items()
        ]
        raw = {"series": series, "outcomes": dict(seen.outcomes), "restarts_s": seen.restarts_s}
        write_results(arguments.json, "soak", arguments, before, [raw])
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
