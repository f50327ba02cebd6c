"""`visionfast serve` as a process, for the tests that start it as a shell would."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

__all__ = ["Serving", "children", "lives"]


class Serving:
    """A `visionfast serve`, and what it says."""

    def __init__(self, pipeline: Path, *options: str) -> None:
        ports = ["--http", "0", "--grpc", "0", "--metrics", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "visionfast.cli", "serve", str(pipeline), *ports, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        (ready,) = self.hear("ready at")
        self.url = ready.split("ready at ")[1].split(",")[0]
        self.pid = self.server_pid()

    def server_pid(self) -> int:
        """Of the server that there is now."""
        return next(pid for pid in map(int, children(self.process.pid)) if _is_server(pid))

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.said.append(line.rstrip())

    def hear(self, words: str, within_s: float = 60.0, *, times: int = 1) -> list[str]:
        """The lines with these words, as soon as there are so many."""
        ends = time.monotonic() + within_s
        while len(heard := [line for line in self.said if words in line]) < times:
            assert time.monotonic() < ends, f"{words!r} not in {self.said}"
            assert self.process.poll() is None, self.said + list(self.process.stderr or ())
            time.sleep(0.02)
        return heard

    def finish(self, within_s: float = 60.0) -> tuple[int, list[str]]:
        """Its exit code and what it said on stderr, once it has ended by itself."""
        code = self.process.wait(within_s)
        self._reader.join()
        return code, (self.process.stderr.read().splitlines() if self.process.stderr else [])

    def end(self) -> None:
        if self.process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGTERM):
                self.process.send_signal(number)
            self.process.wait(60)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def children(pid: int) -> list[str]:
    return " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()


def _is_server(pid: int) -> bool:
    return b"tritonserver" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
