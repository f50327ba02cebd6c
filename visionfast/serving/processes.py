"""A server's processes as Linux tells them: its stages, each a Python of its own, and how a process ended."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Stage", "how_ended", "stages_of"]

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Stage:
    """One instance of a model of the Python backend, such as `yolov8s_0`."""

    name: str
    pid: int

    def fault(self) -> str | None:
        """How it ended, if it did while the server counted on it.

        Triton doesn't say: a model whose process was killed stays ready, and so does the server.
        """
        try:
            # After the program's name, which is in brackets and may hold anything: state, …, exit code at the end.
            fields = (_PROC / str(self.pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "is gone"
        if fields[0] not in "ZX":
            return None
        code = int(fields[-1])
        return _how(code & 0x7F, code >> 8)


def stages_of(server_pid: int) -> tuple[Stage, ...]:
    """The stages of a server, by name."""
    children: list[int] = []
    for thread in (_PROC / str(server_pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, thread.read_text().split())
    stages = []
    for pid in children:
        with contextlib.suppress(OSError):
            arguments = (_PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if arguments[0].endswith(b"triton_python_backend_stub"):
                # … its model's file, its shared memory, sizes, the server's process, …, its name, its runtime
                stages.append(Stage(os.fsdecode(arguments[-2]), pid))
    return tuple(sorted(stages, key=lambda stage: stage.name))


def how_ended(pid: int) -> str | None:
    """How a child of ours ended; None while it lives. It stays uncollected, so nothing else gets its number."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "is gone"  # somebody else in this process collects children
    if ended is None:
        return None
    return _how(*((0, ended.si_status) if ended.si_code == os.CLD_EXITED else (ended.si_status, 0)))


def _how(number: int, code: int) -> str:
    if not number:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"
