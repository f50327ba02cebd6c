"""Who else computes on this machine meanwhile: above a little, figures say nothing, and no verdict is given."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["QUIET", "OtherLoad"]

QUIET = 0.03
"""Share of the processors that others may take before the figures say nothing."""

_STAT = Path("/proc/stat")


class OtherLoad:
    """What share of the processors went to anyone but this process since it was made (Linux; elsewhere unknown)."""

    def __init__(self) -> None:
        self._began = self._now()

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
        now = self._now()
        if self._began is None or now is None or now[0] <= self._began[0]:
            return None
        wall, busy, own = (after - before for after, before in zip(now, self._began, strict=True))
        return max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))
