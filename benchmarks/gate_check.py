"""Does `visionfast bench --against` let an unchanged build pass, and does it find one that is 10 % slower?

A baseline is measured, then the same build again and again, each time in a process of its own, as it is and with a
slow-down planted: after every answer the thread computes on for a share of what the answer took. The gate is asked
about each. What it calls slower and is not is a false alarm; what is slower and passes is missed. Every few reruns
there is a new baseline: against a single one, a baseline that happens to be slow would hide every false alarm, and one
that happens to be fast would make them all.

    .venv/bin/python benchmarks/gate_check.py ENGINE --reruns 20 --seconds 20 --json FILE

On two processors and with two scenarios, 20 reruns of each kind take some half an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from visionfast.artifacts import find_engine
from visionfast.bench.engine_systems import open_visionfast
from visionfast.bench.environment import environment
from visionfast.bench.gate_run import decide
from visionfast.bench.inputs import made_mix
from visionfast.bench.records import SCENARIOS, Record, Scenario, read_record, write_record
from visionfast.bench.run import measure
from visionfast.bench.systems import Answer, Call, ControlSystem, SystemUnderTest
from visionfast.errors import VisionfastError
from visionfast.pipeline import runs_here


class Slowed:
    """A system that takes a share longer, which one of its stages is blamed for."""

    def __init__(self, system: SystemUnderTest, share: float, stage: str) -> None:
        self._of, self._share, self._stage = system, share, stage
        self.system, self.caches = system.system, system.caches

    def call(self, encoded: bytes) -> Answer:
        return self._slowed(self._of.call)(encoded)

    def parallel(self, n: int) -> Sequence[Call]:
        return [self._slowed(call) for call in self._of.parallel(n)]

    def close(self) -> None:
        self._of.close()

    def _slowed(self, call: Call) -> Call:
        def slower(encoded: bytes) -> Answer:
            started = perf_counter_ns()
            answer = call(encoded)
            answered = perf_counter_ns()
            until = answered + int((answered - started) * self._share)
            while (now := perf_counter_ns()) < until:
                pass
            own = answer.stage_ns.get(self._stage, 0)
            return Answer(answer.found, {**answer.stage_ns, self._stage: own + now - answered})

        return slower


def run_once(arguments: argparse.Namespace) -> None:
    """In a process of its own: one run, into `arguments.worker`."""
    baseline = None if arguments.baseline is None else read_record(arguments.baseline)
    folder = find_engine(arguments.engine, usable=runs_here)
    inputs = {made.sha256: made for made in made_mix()}
    used = list(inputs.values()) if baseline is None else [inputs[old.sha256] for old in baseline.inputs]
    options: dict[str, Any] = {"all_inputs": baseline is not None}
    for scenario in () if baseline is None else baseline.scenarios:
        settings = baseline.samples["visionfast", scenario].settings
        options |= {name: settings[name] for name in ("rate_per_s", "bound_ms") if name in settings}
    with contextlib.closing(open_visionfast(folder)) as system:
        tested = Slowed(system, arguments.slow, arguments.stage) if arguments.slow else system
        record = measure(
            [tested, ControlSystem()],
            used,
            scenarios=arguments.scenarios.split(","),
            seconds=arguments.seconds,
            seed=arguments.seed,
            **options,
        )
    write_record(arguments.worker, record)


def measured(arguments: argparse.Namespace, into: Path, *, baseline: Path | None, slow: float, seed: int) -> Record:
    command = [sys.executable, __file__, arguments.engine, "--worker", str(into), "--slow", str(slow)]
    command += ["--seed", str(seed), "--seconds", str(arguments.seconds), "--scenarios", arguments.scenarios]
    command += ["--stage", arguments.stage]
    command += [] if baseline is None else ["--baseline", str(baseline)]
    subprocess.run(command, check=True)
    record = read_record(into)
    return dataclasses.replace(record, others_cpu_share=None) if arguments.disturbed_too else record


def check(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The two figures, and what they are made of."""
    path = folder / "baseline.json"
    baselines: list[Record] = []
    reruns: list[dict[str, Any]] = []
    began = time.monotonic()
    for number in range(arguments.reruns):
        if number % arguments.reruns_a_baseline == 0:
            baseline = measured(arguments, path, baseline=None, slow=0.0, seed=1000 * number)
            print(
                f"baseline: {len(baseline.inputs)} images, others took {_share(baseline)} of the processors", flush=True
            )
            write_record(path, baseline)
            baselines.append(baseline)
        for slow in (0.0, arguments.plant):  # by turns: the machine's moods are for both
            seeds = iter(range(1000 * number + (100 if slow else 1), 10**6))
            runs: list[Record] = []

            def again(slow: float = slow, seeds: Any = seeds, runs: list[Record] = runs) -> Record:
                runs.append(measured(arguments, folder / "run.json", baseline=path, slow=slow, seed=next(seeds)))
                return runs[-1]

            verdict, _ = decide(baseline, again, tolerance=arguments.tolerance)
            totals = {f.scenario: [round(f.ratio, 4), round(f.low, 4)] for f in verdict.findings if f.part == "total"}
            reruns.append(
                {
                    "baseline": len(baselines) - 1,
                    "planted": slow,
                    "status": verdict.status,
                    "runs": len(runs),
                    "stage": verdict.stage,
                    "slower": [str(finding) for finding in verdict.slower],
                    "withheld": list(verdict.withheld),
                    "ratio_and_low": totals,
                    "others_cpu_share": [record.others_cpu_share for record in runs],
                }
            )
            print(f"{number + 1}: planted {slow:.0%}: {verdict.status} {verdict.stage or ''} {totals}", flush=True)
    return {
        "baselines": [{"others_cpu_share": baseline.others_cpu_share} for baseline in baselines],
        "reruns": reruns,
        "seconds": time.monotonic() - began,
    }


def _share(record: Record) -> str:
    return "?" if record.others_cpu_share is None else f"{record.others_cpu_share:.1%}"


def report(found: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Prints the two figures; whether there was no false alarm and nothing was missed."""
    counted = Counter((run["planted"] > 0, run["status"]) for run in found["reruns"])
    print(f"against {len(found['baselines'])} baselines, {arguments.reruns_a_baseline} reruns of each kind on each:")
    for planted in (False, True):
        withheld = counted[planted, "no verdict"]
        said = sum((run["planted"] > 0) is planted for run in found["reruns"]) - withheld
        what = f"planted {arguments.plant:.0%}: found" if planted else "unchanged: false alarms"
        number = counted[planted, "slower"] + counted[planted, "broken"]
        print(f"{what} {number} of {said}" + (f"; {withheld} without a verdict" if withheld else ""))
    named = Counter(run["stage"] for run in found["reruns"] if run["planted"] and run["status"] == "slower")
    print("blamed: " + (", ".join(f"{stage} {count}" for stage, count in named.items()) or "nothing"))
    return not (counted[False, "slower"] + counted[False, "broken"] + counted[True, "not slower"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="a model's name under engines/, or a folder")
    parser.add_argument("--reruns", type=int, default=20, help="of the unchanged build, and of the slowed one")
    parser.add_argument("--reruns-a-baseline", type=int, default=4, help="of each kind, before a new one is measured")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each scenario")
    parser.add_argument("--scenarios", default="single-stream,offline", help="with commas between")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--plant", type=float, default=0.10, help="share by which it is slowed")
    parser.add_argument("--stage", default="engine", help="that is blamed for it")
    parser.add_argument("--disturbed-too", action="store_true", help="judge whatever others took of the processors")
    parser.add_argument("--json", type=Path, help="every verdict goes here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 at a false alarm or a miss")
    for hidden, kind, default in (("--worker", Path, None), ("--baseline", Path, None), ("--slow", float, 0.0)):
        parser.add_argument(hidden, type=kind, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reruns_a_baseline < 1:
        parser.error(f"--reruns-a-baseline {arguments.reruns_a_baseline}: expected 1 or more")
    scenarios: list[Scenario] = [s for s in SCENARIOS if s in arguments.scenarios.split(",")]
    if len(scenarios) < len(arguments.scenarios.split(",")):
        parser.error(f"--scenarios {arguments.scenarios}: expected some of {', '.join(SCENARIOS)}")
    return arguments


def main() -> int:
    arguments = _arguments()
    if arguments.worker is not None:
        run_once(arguments)
        return 0
    with tempfile.TemporaryDirectory(prefix="visionfast-gate-") as folder:
        found = check(arguments, Path(folder))
    fine = report(found, arguments)
    if arguments.json is not None:
        content = {
            "benchmark": "gate_check",
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": {
                n: getattr(arguments, n)
                for n in ("reruns", "reruns_a_baseline", "seconds", "scenarios", "tolerance", "plant", "stage")
            },
            "engine": Path(arguments.engine).name,
            "environment": environment(),
            **found,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if arguments.strict and not fine else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
