"""Proves the GPU half on the first CUDA machine there is: right answers first, then what they cost.

It uses what is there of torch, Triton, DALI, TensorRT and TensorRT-RTX and names what is not; it changes no setting of
the device, asks no network for anything, and keeps what it has found after every check. Exit code 1 when something is
wrong or could not be done; a missed goal is shown, and is no fault.

    .venv/bin/python benchmarks/gpu_check.py                    # every check, 5 minutes at most
    .venv/bin/python benchmarks/gpu_check.py --only masks       # one of them
    .venv/bin/python benchmarks/gpu_check.py --rehearse         # all of it without a GPU: no figure is a measurement
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
for _folder in (_HERE, _HERE.parent):  # runs from a checkout, installed or not
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}

from gpu_checks.rows import Deadline, Ledger, Row, read_rows, show  # noqa: E402

# What it is, where it is, and its share of the time that is left when it begins: at most so much.
CHECKS: dict[str, tuple[str, float]] = {
    "device": ("gpu_checks.device:check_device", 0.1),
    "detections": ("gpu_checks.kernel_results:check_detections", 0.2),
    "masks": ("gpu_checks.kernel_results:check_masks", 0.15),
    "letterbox": ("gpu_checks.kernel_results:check_letterbox", 0.15),
    "prompt kernels": ("gpu_checks.prompt_checks:check_prompt_kernels", 0.15),
    "certificate": ("gpu_checks.session_checks:check_certificate", 0.3),
    "graph": ("gpu_checks.session_checks:check_graph", 0.3),
    "requests": ("gpu_checks.session_checks:check_frugality", 0.3),
    "threads": ("gpu_checks.session_checks:check_threads", 0.4),
    "prompt session": ("gpu_checks.prompt_checks:check_prompt_session", 0.3),
    "kernel times": ("gpu_checks.kernel_times:check_kernel_times", 0.3),
    "prompt times": ("gpu_checks.prompt_checks:check_prompt_times", 0.3),
    "dali": ("gpu_checks.latency:check_dali", 0.2),
    "stages": ("gpu_checks.latency:check_waterfall", 0.3),
    "latency": ("gpu_checks.latency:check_latency", 1.0),
}
_GRACE_S = 20  # beyond the budget, before a check that does not end is interrupted
_NO_MEASUREMENT = "rehearsal: no figure here is a measurement"


class _OutOfTimeError(Exception):
    pass


def run(arguments: argparse.Namespace, rows: Sequence[Row] = ()) -> Ledger:
    """Every check that was asked for; `rows`: of a process before this one."""
    deadline = Deadline(arguments.seconds)
    machine = _machine(arguments.rehearse, arguments.device)
    from gpu_checks.device import COPY_ROW
    from gpu_checks.subjects import FULL, TINY, Context, Subjects

    scale = TINY if arguments.rehearse else FULL
    title = _NO_MEASUREMENT if arguments.rehearse else f"gpu-check on {machine.name}"
    header = {
        "benchmark": "gpu-check",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rehearsal": arguments.rehearse,
        "note": _NO_MEASUREMENT if arguments.rehearse else "",
        "command": {k: [p.name for p in v] if k == "weights" else str(v) for k, v in vars(arguments).items()},
        "git": _revision(),
        "environment": machine.facts(),
    }
    ledger = Ledger(_json_path(arguments, machine.name), header, rows)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        subjects = Subjects(machine, scale, arguments.weights, Path(scratch))
        names = arguments.only or list(CHECKS)
        for index, name in enumerate(names):
            if not deadline.left():
                ledger.rows.append(Row(name, name, "not run", detail="out of time"))
                ledger.write()
                continue
            rate = next((r.figure for r in ledger.rows if r.name == COPY_ROW), None) or 0.0
            target, share = CHECKS[name]
            until = deadline.within(share * deadline.left())
            began, started = len(ledger.rows), time.monotonic()
            _check(target, name, Context(machine, scale, subjects, arguments.seed, until, rate * 1e9), deadline, ledger)
            ledger.write()
            show(ledger.rows[began:], f"{title}: {name}, {time.monotonic() - started:.0f} s")
            # An illegal access ends the context, and every later check would fail with it: a new process has a new one.
            if not machine.is_alive():
                ledger.rows.append(Row(name, "the device after this check", "failed", detail="it no longer answers"))
                ledger.write()
                if names[index + 1 :]:
                    return _continued(arguments, names[index + 1 :], deadline, ledger)
    return ledger


def _check(target: str, name: str, context: Any, deadline: Deadline, ledger: Ledger) -> None:
    """Adds the check's rows; an exception is one of them."""
    module, function = target.split(":")
    try:
        with _interrupted_after(deadline.left() + _GRACE_S):
            for row in getattr(importlib.import_module(module), function)(context):
                ledger.rows.append(row)
    except _OutOfTimeError:
        ledger.rows.append(Row(name, name, "not run", detail="interrupted: out of time"))
    except ModuleNotFoundError as error:
        of_ours = (error.name or "").partition(".")[0] in ("visionfast", "gpu_checks")
        ledger.rows.append(Row(name, name, "failed" if of_ours else "absent", detail=f"{error}{_place(error)}"))
    except Exception as error:
        lines = str(error).splitlines() or [""]
        ledger.rows.append(Row(name, name, "failed", detail=f"{type(error).__name__}: {lines[0]}{_place(error)}"))


def _place(error: BaseException) -> str:
    """The innermost line of our own that it came through."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if _HERE.parent in path.parents and ".venv" not in path.parts:
            place = f" ({path.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


class _interrupted_after:  # noqa: N801, reads as a word
    """Raises `_OutOfTimeError` in the main thread after so many seconds; elsewhere it does nothing."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        def stop(_signal: int, _frame: Any) -> None:
            raise _OutOfTimeError

        try:
            self._before = signal.signal(signal.SIGALRM, stop)
        except ValueError:  # not the main thread
            self._before = None
            return
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)


def _continued(arguments: argparse.Namespace, names: Sequence[str], deadline: Deadline, ledger: Ledger) -> Ledger:
    """The rest in a process of its own, which begins with the rows that there are."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        kept = Path(folder) / "rows.json"
        Ledger(kept, ledger.header, ledger.rows).write()
        command = [sys.executable, str(Path(__file__).resolve()), "--seconds", str(deadline.left())]
        command += ["--seed", str(arguments.seed), "--device", str(arguments.device), "--only", *names]
        command += ["--continue", str(kept), "--json", str(kept)]
        command += ["--weights", *map(str, arguments.weights)] if arguments.weights else []
        subprocess.run(command, check=False)
        ledger.rows = read_rows(kept)
    ledger.write()
    return ledger


def _machine(rehearse: bool, index: int) -> Any:
    if rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported
        from gpu_checks.host_machine import HostMachine

        return HostMachine()
    from gpu_checks.cuda_machine import CudaMachine

    return CudaMachine(index)


def _json_path(arguments: argparse.Namespace, card: str) -> Path | None:
    if arguments.json is not None:
        return Path(arguments.json)
    if arguments.rehearse:
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return _HERE / "results" / f"gpu-{slug}-{datetime.now(timezone.utc):%Y-%m-%d}.json"


def _revision() -> str:
    git = ["git", "-C", str(_HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, nargs="+", default=[], help="YOLOv8 checkpoints (default: models/)")
    parser.add_argument("--seconds", type=float, default=300, help="for everything")
    parser.add_argument("--json", type=Path, help="raw samples (default: benchmarks/results/gpu-CARD-DATE.json)")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help=f"of: {', '.join(CHECKS)}")
    parser.add_argument("--device", type=int, default=0, help="as CUDA counts them")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"), help="of the random input")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, on the host")
    parser.add_argument("--continue", dest="continued", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.rehearse and arguments.json and (_HERE / "results") in arguments.json.resolve().parents:
        parser.error(f"--json: {_NO_MEASUREMENT}: keep it out of benchmarks/results")
    return arguments


def main(given: Sequence[str] | None = None) -> int:
    arguments = parsed(given)
    rows = read_rows(arguments.continued) if arguments.continued else []
    ledger = run(arguments, rows)
    counts = {v: sum(r.verdict == v for r in ledger.rows) for v in ("ok", "failed", "absent", "not run")}
    goals = [row for row in ledger.rows if row.goal]
    met = sum(bool(row.met) for row in goals)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()), f"; goals met: {met} of {len(goals)}", sep="")
    if arguments.rehearse:
        print(_NO_MEASUREMENT)
    for row in ledger.rows:
        if row.verdict == "failed":
            print(f"failed: {row.check}: {row.name}: {row.detail}")
    return 1 if ledger.has_failed() else 0


if __name__ == "__main__":
    from visionfast.errors import VisionfastError

    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
