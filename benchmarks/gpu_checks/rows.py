"""What the checks find: rows, how they are shown, and how they are kept."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

__all__ = ["Deadline", "Ledger", "Row", "Verdict", "absent", "judged", "read_rows", "show", "timed"]

Verdict: TypeAlias = Literal["ok", "failed", "absent", "not run"]
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at.

    Attributes:
        check: key of the check.
        name: what was looked at.
        verdict: `ok`: it is right, or it was measured; `failed`: it is wrong, or could not be done; `absent`: what it
            needs is not on this machine; `not run`: there was no time.
        figure: of `unit`; of samples their median.
        unit: of `figure`; `ns` where there are samples.
        beside: what the figure is to be seen beside: a floor, a rival.
        goal: of the project, in words; empty where there is none.
        met: whether the figure is within the goal; that is no question of right and wrong.
        detail: how, what of, or why not; one line.
        samples_ns: every one of them.
    """

    check: str
    name: str
    verdict: Verdict
    figure: float | None = None
    unit: str = ""
    beside: str = ""
    goal: str = ""
    met: bool | None = None
    detail: str = ""
    samples_ns: tuple[int, ...] = field(default=(), repr=False)


def judged(check: str, name: str, right: bool, detail: str = "", **more: Any) -> Row:
    return Row(check, name, "ok" if right else "failed", detail=detail, **more)


def absent(check: str, name: str, why: str) -> Row:
    return Row(check, name, "absent", detail=why)


def timed(
    check: str,
    name: str,
    samples_ns: Sequence[int],
    *,
    beside: str = "",
    goal_ns: float | None = None,
    detail: str = "",
) -> Row:
    """A measurement; none where there was no time for a single sample."""
    if not samples_ns:
        return Row(check, name, "not run", detail="out of time")
    median = float(np.median(samples_ns))
    return Row(
        check,
        name,
        "ok",
        median,
        "ns",
        beside,
        "" if goal_ns is None else f"≤ {in_words(goal_ns)}",
        None if goal_ns is None else median <= goal_ns,
        detail,
        tuple(samples_ns),
    )


def in_words(ns: float) -> str:
    """Nanoseconds for people: `41.2 µs`."""
    unit, size = next(((u, s) for u, s in _UNITS if abs(ns) >= s), ("ns", 1.0))
    return f"{ns / size:.3g} {unit}"


class Deadline:
    """When to stop, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self.at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """The earlier of this one and so many seconds from now."""
        return Deadline(min(seconds, self.left()))


class Ledger:
    """All rows so far; written to `path` anew after every check, so that whoever is stopped keeps what there was."""

    def __init__(self, path: Path | None, header: Mapping[str, Any], rows: Sequence[Row] = ()) -> None:
        self.rows = list(rows)
        self.header = dict(header)
        self._path = path

    def write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        content = self.header | {"rows": [asdict(row) for row in self.rows]}
        beside.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n", "utf-8")
        beside.replace(self._path)

    def has_failed(self) -> bool:
        return any(row.verdict == "failed" for row in self.rows)


def read_rows(path: Path) -> list[Row]:
    """Those that a `Ledger` wrote."""
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return [Row(**row | {"samples_ns": tuple(row["samples_ns"])}) for row in rows]


# ---- for people --------------------------------------------------------------------------------------------


def _cells(row: Row) -> tuple[str, str, str, str, str, str]:
    if row.samples_ns:
        unit, size = next(((u, s) for u, s in _UNITS if (row.figure or 0) >= s), ("ns", 1.0))
        points = np.percentile(row.samples_ns, (50, 95, 99)) / size
        figure = f"{points[0]:.3g} / {points[1]:.3g} / {points[2]:.3g} {unit}"
    elif row.figure is not None:
        figure = f"{row.figure:.4g} {row.unit}".rstrip()
    else:
        figure = ""
    goal = row.goal and f"{row.goal}: {'met' if row.met else 'missed'}"
    return row.name, row.verdict, figure, row.beside, goal, row.detail


def show(rows: Sequence[Row], title: str) -> None:
    """A table of at most 120 columns on stdout; without rich, the same words line by line."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(title)
        for row in rows:
            print(" | ".join(cell for cell in _cells(row) if cell), flush=True)
        return
    console = Console(width=120, highlight=False)
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for heading, width in (("", 28), ("", 8), ("P50 / P95 / P99", 21), ("beside", 15), ("goal", 13), ("", 29)):
        table.add_column(heading, width=width, overflow="fold")
    colours = {"ok": "green", "failed": "red", "absent": "yellow", "not run": "yellow"}
    for row in rows:
        name, verdict, figure, beside, goal, detail = (escape(cell) for cell in _cells(row))
        table.add_row(name, f"[{colours[row.verdict]}]{verdict}[/]", figure, beside, goal, detail)
    console.print(table)
