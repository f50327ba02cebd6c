"""The verb `top`: what a server does, as it does it."""

from __future__ import annotations

import json as json_text
import math
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visionfast.errors import OptionError, ServerError
from visionfast.terminal import one_line

if TYPE_CHECKING:
    from rich.console import Group

    from visionfast.serving.activity import Activity, ModelActivity, StageActivity

__all__ = ["top_verb"]


def top_verb(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server's metrics: http://localhost:8002.")],
    interval: Annotated[float, typer.Option(help="Seconds that every figure is of.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, show it, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON line an interval.")] = False,
) -> None:
    """Show what a server does, live. Images a second, errors, and percentiles of every stage; Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from visionfast.serving.activity import activity_between
    from visionfast.serving.scrape import metrics_url, scrape

    if not 0.1 <= interval <= 3600:
        raise OptionError(f"--interval {interval}: expected 0.1 to 3600 seconds")
    address = metrics_url(url)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a pipe or a file has no edge to wrap at
    watched = console.is_terminal and not (once or json)
    try:
        before = scrape(address)
        with Live(console=console, auto_refresh=False) if watched else nullcontext() as live:
            while True:
                time.sleep(interval)
                try:
                    after = scrape(address)
                    activity = activity_between(before, after)
                except ServerError as error:
                    if once:
                        raise
                    # It may be starting again.
                    told = f"{one_line(str(error))}; looking again"
                    if live is None:
                        print(f"visionfast: {told}", file=sys.stderr, flush=True)
                    else:
                        live.update(told, refresh=True)
                    continue
                before = after
                if json:
                    print(json_text.dumps(_record(address, activity)), flush=True)
                elif live is None:
                    console.print(_tables(address, activity))
                else:
                    live.update(_tables(address, activity), refresh=True)
                if once:
                    return
    except KeyboardInterrupt:
        pass  # as it is meant to end


def _record(url: str, activity: Activity) -> dict[str, Any]:
    """Rates a second, and milliseconds; `null` where nothing was observed."""
    return {
        "url": url,
        "interval_s": round(activity.interval_s, 3),
        "models": {
            name: {
                "requests_per_s": _finite(model.requests_per_s),
                "images_per_s": _finite(model.images_per_s),
                "errors_per_s": {kind: _finite(rate) for kind, rate in model.errors_per_s.items()},
                "cached_per_s": _finite(model.cached_per_s),
                "queue_ms": _finite(model.queue_ms),
                "waiting": model.waiting,
                "queues": {step: _percentiles(some) for step, some in model.queues.items()},
                "stages": {stage: _percentiles(some) for stage, some in model.stages.items()},
            }
            for name, model in activity.models.items()
        },
        "cpu": _finite(activity.cpu),
        "memory_bytes": _finite(activity.memory_bytes),
        "memory_total_bytes": _finite(activity.memory_total_bytes),
    }


def _percentiles(some: StageActivity) -> dict[str, float | None]:
    found = {f"p{percentile}_ms": _finite(ms) for percentile, ms in some.percentile_ms.items()}
    return {"count": _finite(some.count), **found}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _tables(url: str, activity: Activity) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from visionfast.serving.activity import PERCENTILES

    models = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "requests/s", "images/s", "cached/s", "queue ms", "waiting", "errors/s"):
        models.add_column(title, justify="left" if title in ("model", "errors/s") else "right")
    stages = Table(box=None, pad_edge=False, header_style="bold")
    stages.add_column("model")
    stages.add_column("stage")
    for title in ("count", *(f"p{percentile} ms" for percentile in PERCENTILES)):
        stages.add_column(title, justify="right")
    for name, model in activity.models.items():
        shown = Text(one_line(name))
        models.add_row(
            shown,
            *(f"{rate:.1f}" for rate in (model.requests_per_s, model.images_per_s, model.cached_per_s)),
            _ms(model.queue_ms),
            str(model.waiting),
            Text(_errors(model)),
        )
        queues = {f"queue {step}" if len(model.queues) > 1 else "queue": some for step, some in model.queues.items()}
        for stage, some in {**queues, **model.stages}.items():
            stages.add_row(
                shown, Text(one_line(stage)), f"{some.count:.0f}", *(_ms(ms) for ms in some.percentile_ms.values())
            )
            shown = Text("")
    return Group(_heading(url, activity), models, Text(""), stages)


def _heading(url: str, activity: Activity) -> Any:
    from rich.text import Text

    parts = [one_line(url), f"the last {activity.interval_s:.1f} s"]
    if _finite(activity.cpu) is not None:
        parts.append(f"processors {activity.cpu:.0%}")
    if activity.memory_bytes is not None and activity.memory_total_bytes:
        parts.append(f"memory {activity.memory_bytes / 2**30:.1f} of {activity.memory_total_bytes / 2**30:.1f} GiB")
    return Text(" · ".join(parts), style="dim")


def _errors(model: ModelActivity) -> str:
    return ", ".join(f"{one_line(kind)} {rate:.1f}" for kind, rate in model.errors_per_s.items()) or "0"


def _ms(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
