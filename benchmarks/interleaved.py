"""Contestants timed in turns, in one process: a ratio says how fast, the ratios within the rounds how sure that is.

Each round takes every contestant once, in a fresh random order, first untimed (the caches and thread pools that the
previous one left behind are not its own), then timed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Importing ultralytics sets this to 1 where it is not set, which would slow its own rivals; so before torch.
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}

import cv2
import numpy as np
from rich.console import Console
from rich.table import Table

from visionfast import machine
from visionfast.bench.load import QUIET, OtherLoad

__all__ = [
    "QUIET",
    "Contestant",
    "Goal",
    "OtherLoad",
    "Samples",
    "console",
    "environment",
    "interleave",
    "report",
    "result",
    "write_results",
]

_CV2_THREADS = cv2.getNumThreads()
console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to an answer.

    Attributes:
        key: `a`…`f` as in the ratios, with the precision where it is not FP32.
        name: for people.
        call: encoded image → answer.
        cv2_threads: that it runs with; ultralytics sets 0 for the whole process when it is imported.
        wide_only: takes part on 16:9 pictures only.
    """

    key: str
    name: str
    call: Callable[[bytes], Any]
    cv2_threads: int = _CV2_THREADS
    wide_only: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """`numerator` / `denominator`, keys of contestants, should be at most `bound`; `None`: for information."""

    numerator: str
    denominator: str
    bound: float | None = None


@dataclass(slots=True)
class Samples:
    """Of one picture: contestant's key → nanoseconds, one a round; stage → nanoseconds, of each visionfast key."""

    latency_ns: dict[str, list[int]] = field(default_factory=dict)
    stage_ns: dict[str, dict[str, list[int]]] = field(default_factory=dict)


def interleave(
    contestants: Sequence[Contestant],
    encoded: bytes,
    *,
    rounds: int,
    seconds: float = float("inf"),
    warmup: int = 3,
    seed: int = 0,
) -> Samples:
    """Times every contestant once a round, until `rounds` are done or `seconds` are over (at least 3 rounds)."""
    order = list(contestants)
    shuffled = random.Random(seed)
    samples = Samples({c.key: [] for c in order})
    for contestant in order:
        _prepare(contestant)
        for _ in range(warmup):
            contestant.call(encoded)
    began = time.monotonic()
    for done in range(rounds):
        if done >= 3 and time.monotonic() - began > seconds:
            break
        shuffled.shuffle(order)
        for contestant in order:
            _prepare(contestant)
            contestant.call(encoded)
            started = time.perf_counter_ns()
            answer = contestant.call(encoded)
            samples.latency_ns[contestant.key].append(time.perf_counter_ns() - started)
            stages = samples.stage_ns.setdefault(contestant.key, {})
            for stage, spent in getattr(answer, "stage_ns", {}).items():
                stages.setdefault(stage, []).append(spent)
    return samples


def _prepare(contestant: Contestant) -> None:
    cv2.setNumThreads(contestant.cv2_threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(machine.usable_cpus())  # ultralytics sets one fewer for the whole process


def report(
    title: str, contestants: Sequence[Contestant], goals: Sequence[Goal], samples: Samples, *, others: float
) -> bool:
    """Prints one picture's tables; whether every goal holds.

    Args:
        title: of the tables.
        contestants: that were timed.
        goals: for the ratios between them.
        samples: of `interleave`.
        others: `OtherLoad.share` meanwhile; above `QUIET` there is no verdict, and no goal counts as missed.
    """
    disturbed = others > QUIET
    title += f"; others took {others:.0%} of the processors{': [red]disturbed, no verdict[/]' if disturbed else ''}"
    names = {c.key: c.name for c in contestants}
    table = Table("", "", "n", "P50 ms", "P95 ms", "P99 ms", title=title, title_justify="left", box=None)
    for key, latency in samples.latency_ns.items():
        points = np.percentile(latency, (50, 95, 99)) / 1e6
        table.add_row(key, names[key], str(len(latency)), *(f"{p:.1f}" for p in points))
    console.print(table)

    table = Table("ratio", "of medians", "within rounds", "5–95 %", "goal", "holds", box=None)
    every = True
    for goal in goals:
        if not {goal.numerator, goal.denominator} <= samples.latency_ns.keys():
            continue
        over, under = (np.array(samples.latency_ns[k], float) for k in (goal.numerator, goal.denominator))
        ratio, paired = float(np.median(over) / np.median(under)), over / under
        low, middle, high = np.percentile(paired, (5, 50, 95))
        holds = None if goal.bound is None or disturbed else ratio <= goal.bound
        every &= holds is not False
        table.add_row(
            f"{goal.numerator} / {goal.denominator}",
            f"{ratio:.3f}",
            f"{middle:.3f}",
            f"{low:.3f}–{high:.3f}",
            "" if goal.bound is None else f"≤ {goal.bound:g}",
            {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[holds],
        )
    console.print(table)
    for key, stages in samples.stage_ns.items():
        if stages:
            total = np.median(samples.latency_ns[key])
            parts = {stage: float(np.median(spent)) for stage, spent in stages.items()}
            parts["rest"] = float(total) - sum(parts.values())
            console.print(f"{key}: " + ", ".join(f"{stage} {spent / 1e6:.2f} ms" for stage, spent in parts.items()))
    console.print()
    return every


def environment() -> dict[str, str]:
    """What the figures depend on."""
    facts = machine.environment() | {"load_average": " ".join(f"{x:.2f}" for x in os.getloadavg())}
    facts["cv2_threads"] = str(_CV2_THREADS)
    for package in ("visionfast", "numpy", "opencv-python", "openvino", "torch", "torchvision", "ultralytics"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        facts["git"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        facts["git"] = "not a checkout"
    return facts


def result(
    model: str, image: str, contestants: Sequence[Contestant], samples: Samples, *, others: float
) -> dict[str, Any]:
    """One picture's raw samples, for `write_results`."""
    return {
        "model": model,
        "image": image,
        "contestants": {c.key: c.name for c in contestants},
        "latency_ns": samples.latency_ns,
        "stage_ns": samples.stage_ns,
        "others_cpu_share": round(others, 4),
    }


def write_results(
    path: Path, benchmark: str, arguments: argparse.Namespace, before: Mapping[str, str], results: Sequence[Any]
) -> None:
    """The raw samples with all that they depend on, as JSON."""
    content = {
        "benchmark": benchmark,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        # names, not the paths of one machine
        "command": {name: _named(value) for name, value in vars(arguments).items()},
        "environment": before,
        "load_average_after": environment()["load_average"],
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    console.print(f"raw samples: {path}")


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return [_named(item) for item in value]
    return value.name if isinstance(value, Path) else str(value)
