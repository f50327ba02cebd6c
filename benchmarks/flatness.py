"""Does a figure grow? Samples of a server's processes over time, and a slope with its confidence interval.

Two points say nothing: memory goes up and down. Here the samples of a while are put together in blocks (neighbours in
time are alike, and an interval from all of them would be far too narrow), and a line is fitted by least squares, with a
level of its own for each life of a server: what starts anew starts elsewhere. The interval is Student's, 95 %.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["FIGURES", "Series", "Trend", "read_process", "shared_memory_bytes", "trend"]

FIGURES = ("rss_bytes", "threads", "descriptors")
"""Of a process."""

_BLOCKS = 12
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t for 1 to 10 degrees of freedom; 1.96 and a little beyond."""


@dataclass(slots=True)
class Series:
    """One figure over time.

    Attributes:
        seconds: since the beginning.
        value: then.
        life: which start of the server it was.
    """

    seconds: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    life: list[int] = field(default_factory=list)

    def add(self, seconds: float, value: float, life: int = 0) -> None:
        self.seconds.append(seconds)
        self.value.append(value)
        self.life.append(life)


@dataclass(frozen=True, slots=True)
class Trend:
    """What a figure does over the time that was looked at.

    Attributes:
        seconds: that it was looked at, warm-up left out.
        level: its mean.
        growth: over that time, by the slope.
        low, high: the ends of its 95 % interval.
    """

    seconds: float
    level: float
    growth: float
    low: float
    high: float

    def verdict(self, bound: float) -> str:
        """`flat`: no growth beyond the bound is to be believed; `grows`: it is beyond; `undecided`: too little seen."""
        if self.high <= bound:
            return "flat"
        return "grows" if self.low > bound else "undecided"


def trend(series: Series, *, warm_up_s: float) -> Trend | None:
    """The trend of a figure; the first seconds of each life are left out. None: too few samples are left."""
    seconds, value, life = map(np.asarray, (series.seconds, series.value, series.life))
    kept = np.zeros(len(seconds), bool)
    for one in np.unique(life):
        its = life == one
        kept |= its & (seconds - seconds[its].min() >= warm_up_s)
    seconds, value, life = seconds[kept], value[kept], life[kept]
    if len(seconds) < 2 * _BLOCKS:
        return None
    t, y, group = _blocks(seconds, value, life)
    lives = np.unique(group)
    degrees = len(t) - len(lives) - 1
    if degrees < 1:
        return None
    # One level a life: both sides without its mean, then a line through the origin.
    for one in lives:
        t[group == one] -= t[group == one].mean()
        y[group == one] -= y[group == one].mean()
    spread = float((t * t).sum())
    slope = float((t * y).sum()) / spread
    error = float(np.sqrt(((y - slope * t) ** 2).sum() / degrees / spread))
    half = error * (_T975[degrees - 1] if degrees <= len(_T975) else 2.2)
    lasted = float(seconds.max() - seconds.min())
    ends = (slope * lasted, (slope - half) * lasted, (slope + half) * lasted)
    return Trend(lasted, float(value.mean()), *ends)


def _blocks(
    seconds: npt.NDArray[np.float64], value: npt.NDArray[np.float64], life: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Means of neighbours within a life, about `_BLOCKS` in all."""
    size = max(1, len(seconds) // _BLOCKS)
    t, y, group = [], [], []
    for one in np.unique(life):
        its = np.flatnonzero(life == one)
        for part in np.array_split(its, max(1, len(its) // size)):
            t.append(seconds[part].mean())
            y.append(value[part].mean())
            group.append(one)
    return np.array(t), np.array(y, float), np.array(group)


# ---- what there is ------------------------------------------------------------------------------------------------


def read_process(pid: int) -> Mapping[str, float] | None:
    """`FIGURES` of a process; None if it is gone.

    Its memory is without the shared one, which is looked at by itself: whenever Triton's region grows, its processes
    map it once more and keep the mapping that they had, and all of them count (VmRSS) though the pages are the same.
    """
    place = Path("/proc") / str(pid)
    try:
        told = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        return {
            "rss_bytes": (float(told["VmRSS"].split()[0]) - float(told["RssShmem"].split()[0])) * 1024,
            "threads": float(told["Threads"]),
            "descriptors": float(sum(1 for _ in (place / "fd").iterdir())),
        }
    except (OSError, KeyError):  # a zombie has no memory
        return None


def shared_memory_bytes(prefix: str) -> float:
    """Of the regions in /dev/shm whose names begin so; what is allocated, not what it may grow to."""
    total = 0.0
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            total += region.stat().st_blocks * 512
    return total
