"""How far a job over many images is, on stderr: a bar where somebody watches, else a line from time to time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from visionfast.embed_run import Progress

__all__ = ["lines", "shown"]

_RATED = ("embedding", "verifying")
"""Stages that take their time for each image, so that images a second say something."""

_EVERY_S = 30.0
"""Between two lines: a job of a day leaves some 3,000 of them in its log."""


@contextlib.contextmanager
def shown() -> Iterator[Progress]:
    """What tells a job's progress to whom it may concern."""
    if not sys.stderr.isatty():
        yield lines()
    else:
        with _bar() as progress:
            yield progress


def lines(every_s: float = _EVERY_S, clock: Callable[[], float] = time.monotonic) -> Progress:
    """A line on stderr every `every_s` seconds, `visionfast: embedding 230/1000, 7.5 images/s`, and none before.

    The rate is that since the last line.
    """
    stage_now, done_then, then, told = "", 0, clock(), clock()

    def progress(stage: str, done: int, total: int | None) -> None:
        nonlocal stage_now, done_then, then, told
        now = clock()
        if stage != stage_now:
            stage_now, done_then, then = stage, done, now
        if now - told < every_s:
            return
        rate = f", {(done - done_then) / (now - then):.1f} images/s" if stage in _RATED and now > then else ""
        count = f"{done} files" if total is None else f"{done}/{total}"
        print(f"visionfast: {stage} {count}{rate}", file=sys.stderr, flush=True)
        done_then, then, told = done, now, now

    return progress


@contextlib.contextmanager
def _bar() -> Iterator[Progress]:
    """Done, images a second and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Done(ProgressColumn):
        def render(self, task: Task) -> Text:
            done = int(task.completed)
            return Text(f"{done} files" if task.total is None else f"{done}/{int(task.total)}")

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.description not in _RATED:
                return Text("")
            measured = task.speed is not None and (task.elapsed or 0) > 1  # the first few may come all at once
            return Text(f"{task.speed:.1f} images/s" if measured else "– images/s")

    class TimeLeft(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return Text("") if task.total is None else super().render(task)

    columns = (TextColumn("{task.description}"), BarColumn(), Done(), Rate(), TimeLeft())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task: TaskID | None = None
        stage_now = ""

        def progress(stage: str, done: int, total: int | None) -> None:
            nonlocal task, stage_now
            if task is None or stage != stage_now:
                if task is not None:
                    bar.remove_task(task)
                task, stage_now = bar.add_task(stage, total=total, completed=done), stage
            else:
                bar.update(task, completed=done)

        yield progress
