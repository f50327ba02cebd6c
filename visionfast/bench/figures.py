"""What the report shows as pictures: distributions, where the time goes, the waterfall. `bench.plots` has the style."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from visionfast.bench.breakdown import QUEUE, REST
from visionfast.bench.plots import COLOURS, INK, MUTED, canvas, decimals, number_of_rows, rows
from visionfast.bench.statistics import percentile
from visionfast.bench.waterfall import Interval, Waterfall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["distribution_figure", "stage_figure", "waterfall_figure"]

_WIDE_RANGE = 6.0  # largest over smallest figure, from which a logarithmic axis shows both
_DOT = "#2f8fd0"  # seen on white and on black
_FIRST = "#5a6066"  # of what is changed
_MOST_DOTS = 1500  # of one row; more make the page heavy and the row no clearer
_STAGE_COLOURS = {
    QUEUE: "#999999",
    "hash": "#f0e442",
    "decode": "#e69f00",
    "preprocess": "#56b4e9",
    "engine": "#0072b2",
    "encoder": "#0072b2",
    "decoder": "#009e73",
    "postprocess": "#cc79a7",
    REST: "#cfd3d7",
}


def distribution_figure(latency_ms: Mapping[str, npt.NDArray[np.float64]]) -> Figure:
    """A row for each system, from slow to fast: every request a dot, its P50, and P95 and P99 where there are enough.

    Args:
        latency_ms: the system's name → (N,) milliseconds, at least one.
    """
    ordered = sorted(latency_ms.items(), key=lambda item: -float(np.median(item[1])))
    with canvas(number_of_rows(len(ordered))) as (figure, axes):
        rows(axes, [name for name, _ in ordered])
        least = min(float(values.min()) for _, values in ordered)
        most = max(float(values.max()) for _, values in ordered)
        if least > 0 and most / least > _WIDE_RANGE:
            _logarithmic(axes, least, most)
        else:
            axes.set_xlim(0, most * 1.04)
        for place, (_, values) in enumerate(ordered):
            shown = values[:: max(1, len(values) // _MOST_DOTS)]
            # The golden ratio's multiples spread evenly however many there are.
            height = place + 0.5 * ((np.arange(len(shown)) * 0.618034) % 1 - 0.5)
            axes.plot(shown, height, "o", ms=2.6, mew=0, color=_DOT, alpha=0.45)
            p50, *tail = (percentile(values, percent) for percent in (50, 95, 99))
            told = [one.value for one in tail if one.is_enough]
            axes.vlines([p50.value], place - 0.36, place + 0.36, color=INK, linewidth=2.2)
            axes.vlines(told, place - 0.24, place + 0.24, color=COLOURS[5], linewidth=1.4)
            axes.annotate(
                f"{decimals(p50.value)} ms",
                (1.01, place),
                xycoords=("axes fraction", "data"),
                va="center",
                color=INK,
            )
        axes.set_xlabel(
            "latency, ms: a dot is a request, in multi-stream a group; "
            "thick P50 (its figure at the right), thin P95 and P99 of enough samples"
        )
    return figure


def _logarithmic(axes: Axes, least: float, most: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xscale("log")
    axes.set_xlim(least * 0.9, most * 1.1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def stage_figure(stage_ms: Mapping[str, Mapping[str, float]]) -> Figure:
    """A bar for each system or step, in the order given: its stages' means, one behind the other.

    Args:
        stage_ms: name → stage → milliseconds, the rest among them.
    """
    stages = list(dict.fromkeys(stage for parts in stage_ms.values() for stage in parts if stage != REST))
    if any(REST in parts for parts in stage_ms.values()):
        stages.append(REST)
    others = iter(colour for colour in COLOURS if colour not in _STAGE_COLOURS.values())
    colours = {stage: _STAGE_COLOURS.get(stage) or next(others, "#999999") for stage in stages}
    longest = max(sum(parts.values()) for parts in stage_ms.values())
    with canvas(number_of_rows(len(stage_ms)) + 0.35) as (figure, axes):
        rows(axes, list(stage_ms))
        ends = np.zeros(len(stage_ms))
        for stage in stages:
            spent = np.array([max(0.0, parts.get(stage, 0.0)) for parts in stage_ms.values()])
            colour = colours[stage]
            axes.barh(range(len(ends)), spent, 0.62, left=ends, color=colour, label=stage, edgecolor="white", lw=0.5)
            for place, (begin, width) in enumerate(zip(ends, spent, strict=True)):
                if width > 0.055 * longest:
                    _inside(axes, begin + width / 2, place, decimals(width), colour)
            ends += spent
        for place, end in enumerate(ends):
            _beside(axes, end, place, f"{decimals(end)} ms")
        axes.set_xlim(0, longest * 1.1)
        axes.set_xlabel("mean, ms")
        figure.legend(loc="outside upper right", ncols=min(len(stages), 6), frameon=False, fontsize=8.5)
    return figure


def waterfall_figure(found: Waterfall) -> Figure:
    """A bar for each step, from naive PyTorch down: what is left (P50), and what the change took away."""
    steps = found.steps
    longest = max(step.p50_ms for step in steps)
    with canvas(number_of_rows(len(steps)) + 0.2) as (figure, axes):
        rows(axes, [("+ " if place else "") + step.name for place, step in enumerate(steps)])
        for place, step in enumerate(steps):
            colour = _FIRST if place == 0 else COLOURS[4] if step.at_once > 1 else COLOURS[0]
            before = steps[place - 1].p50_ms if place else step.p50_ms
            axes.barh(place, min(step.p50_ms, before), 0.62, color=colour)
            end = max(step.p50_ms, before)
            if place and (gap := abs(before - step.p50_ms)):
                saved = before > step.p50_ms
                axes.barh(
                    place,
                    gap,
                    0.62,
                    left=min(step.p50_ms, before),
                    color=COLOURS[1] if saved else COLOURS[5],
                    alpha=0.55 if saved else 0.9,
                )
                axes.plot([before, before], [place - 0.69, place + 0.31], color=MUTED, lw=0.8)
            if min(step.p50_ms, before) > 0.13 * longest:
                _inside(axes, min(step.p50_ms, before) / 2, place, f"{decimals(step.p50_ms)} ms", colour)
                _beside(axes, end, place, _saving(step.saved_ms))
            else:
                _beside(axes, end, place, f"{decimals(step.p50_ms)} ms   {_saving(step.saved_ms)}")
        axes.set_xlim(0, longest * 1.22)
        said = "P50, ms: blue what is left, orange what the change saves (red: costs), with its 95 % interval"
        if any(step.at_once > 1 for step in steps):
            said += "\nlight blue: the time for each of several images at once"
        axes.set_xlabel(said)
    return figure


def _saving(saved: Interval | None) -> str:
    if saved is None:
        return ""
    text = _signed(saved.value)
    if saved.low is None or saved.high is None:
        return text
    text += f"  ({_signed(saved.low)} to {_signed(saved.high)})"
    return text if saved.sure else f"{text}: unclear"


def _signed(saved_ms: float) -> str:
    return f"{'−' if saved_ms >= 0 else '+'}{decimals(abs(saved_ms))}"


def _inside(axes: Axes, x: float, place: int, text: str, colour: str) -> None:
    """Text in a bar of that colour: white on dark ones, black on light ones."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
    axes.text(x, place, text, ha="center", va="center", color="#ffffff" if dark else "#000000", fontsize=8.5)


def _beside(axes: Axes, x: float, place: int, text: str) -> None:
    axes.annotate(text, (x, place), xytext=(5, 0), textcoords="offset points", va="center", color=INK, fontsize=8.5)
