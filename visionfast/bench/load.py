"""Who else computes on this machine meanwhile: above a little, figures say nothing, and no verdict is given."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["QUIET", "OtherLoad"]

QUIET = 0.03
"""Share of the processors that others may take before the figures say nothing."""

_STAT = Path("/proc/stat")


class OtherLoad:
    """What share of the processors went to anyone but this process since it was made (Linux; elsewhere unknown).

    Args:
        children: the processes below this one are no others: servers and workers that are part of what is measured.
    """

    def __init__(self, *, children: bool = False) -> None:
        self._children = children
        self._began = self._now_with_children()

    def _now_with_children(self) -> tuple[float, float, float] | None:
        if (now := self._now()) is None or not self._children:
            return now
        wall, busy, own = now
        return wall, busy, own + _children_s(os.getpid())

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds: wall, all processors' busy time (what a hypervisor stole included), this process's own."""
        try:
            ticks = [int(x) for x in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait
        return time.monotonic(), busy, time.process_time()

    def share(self) -> float | None:
        """0..1 of all processors' time; `None` where the system does not tell."""
        now = self._now_with_children()
        if self._began is None or now is None or now[0] <= self._began[0]:
            return None
        wall, busy, own = (after - before for after, before in zip(now, self._began, strict=True))
        return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))


def _children_s(root: int) -> float:
    """Processor seconds of all processes below one, and of those that it and they have waited for."""
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            spent[pid] = sum(map(int, fields[13:15]))  # of those that have ended
            if pid != root:
                spent[pid] += sum(map(int, fields[11:13]))  # its own

    def is_family(pid: int) -> bool:
        while pid > 1:
            if pid == root:
                return True
            pid = parents.get(pid, 0)
        return False

    return sum(ticks for pid, ticks in spent.items() if is_family(pid)) / os.sysconf("SC_CLK_TCK")
