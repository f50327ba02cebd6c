"""A record's figures as the report's tables. Everything that comes from outside is escaped here."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from visionfast.bench.comparison import time_ratio
from visionfast.bench.plots import decimals
from visionfast.bench.records import Input, Record, Scenario, System
from visionfast.bench.statistics import Percentile, Ratio
from visionfast.bench.summary import Summary, summaries
from visionfast.bench.waterfall import Interval, Waterfall
from visionfast.terminal import one_line

__all__ = [
    "BESIDE",
    "NOT_COMPARED",
    "compared",
    "escaped",
    "facts",
    "has_latencies",
    "inputs_in_words",
    "own_system",
    "results_table",
    "table",
    "times",
    "waterfall_table",
]

NOT_COMPARED = ("null", "control", "step")
"""Kinds of systems that are no rivals."""

BESIDE = "measured beside"
"""Among a system's details: the key of the visionfast that shared its rounds, where it is not the record's first. Who
has it goes over a heap in batches (`bench.dino_loop`), and its rows are no requests of their own: see `has_latencies`.
"""

_SHOWN = (50.0, 90.0, 95.0, 99.0)  # percentiles


def escaped(text: object) -> str:
    return html.escape(one_line(str(text)), quote=True)


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", left: int = 1, own: int | None = None
) -> str:
    """A table of HTML that is ready; columns from `left` on are numbers; row `own` stands out."""
    titles = "".join(f"<th{_numeric(i, left)}>{title}</th>" for i, title in enumerate(head))
    body, marked = "", '<tr class="own">'
    for number, cells in enumerate(rows):
        first, *others = cells
        line = f'<th scope="row"{_numeric(0, left)}>{first}</th>'
        line += "".join(f"<td{_numeric(i + 1, left)}>{cell}</td>" for i, cell in enumerate(others))
        body += f"{marked if number == own else '<tr>'}{line}</tr>\n"
    said = f"<caption>{caption}</caption>" if caption else ""
    return f'<div class="wide"><table>{said}<thead><tr>{titles}</tr></thead><tbody>\n{body}</tbody></table></div>\n'


def _numeric(column: int, left: int) -> str:
    return ' class="n"' if column >= left else ""


def facts(pairs: Mapping[str, str], caption: str = "") -> str:
    """Name and value, a row each."""
    return table(("", ""), [(escaped(name), escaped(value)) for name, value in pairs.items()], caption=caption, left=2)


# ---- one scenario -----------------------------------------------------------------------------------------


def own_system(record: Record) -> System | None:
    """The one that the others are compared with."""
    return next((system for system in record.systems if system.kind == "visionfast"), None)


def compared(record: Record, key: str, scenario: Scenario) -> Ratio | None:
    """`comparison.time_ratio` of a system to visionfast; `None` also where no speed-up may be reported: one of the two
    has a certificate that failed."""
    own, system = own_system(record), record.system(key)
    if own is None or own.key == key or "failed" in (s.details.get("certificate") for s in (own, system)):
        return None
    beside = system.details.get(BESIDE, own.key)
    return time_ratio(record, key, beside, scenario)


def has_latencies(system: System) -> bool:
    """Whether what an image took means anything beside the others'; else only its images a second do."""
    return BESIDE not in system.details


def times(found: Ratio | None) -> str:
    """`3.21 ×` with its interval below."""
    if found is None:
        return ""
    if math.isnan(found.low):
        return f"{found.value:.2f} ×<small>too few rounds for an interval</small>"
    return f"{found.value:.2f} ×<small>{found.low:.2f} to {found.high:.2f}</small>"


def results_table(record: Record, scenario: Scenario) -> str:
    """Everybody in one scenario, from slow to fast."""
    rivals = {system.key: system for system in record.systems if system.kind not in NOT_COMPARED}
    found = [s for s in summaries(record) if s.scenario == scenario and s.system in rivals]
    found.sort(key=_fast_last)
    own = own_system(record)
    rate = {"offline": ["images/s"], "server": ["requests/s"]}.get(scenario, [])
    last = (
        "visionfast answers …<br>times as many" if scenario == "offline" else "takes … times as<br>long as visionfast"
    )
    rows = []
    for summary in found:
        system = rivals[summary.system]
        name, n = escaped(system.name), str(len(record.samples[system.key, scenario]))
        for words in (system.details.get("agreement"), *_doubts(summary)):
            name += f"<small>{escaped(words)}</small>" if words else ""
        n += f"<small>{summary.failed} failed</small>" if summary.failed else ""
        shown = [_percentile(summary.latency_ns[percent]) for percent in _SHOWN]
        cells = [name, n, *(shown if has_latencies(system) else ["–"] * len(_SHOWN))]
        cells += [_rate(summary)] if rate else []
        cells.append("1" if own and system.key == own.key else times(compared(record, system.key, scenario)))
        rows.append(cells)
    place = next((i for i, summary in enumerate(found) if own and summary.system == own.key), None)
    head = ["", "requests", *(f"P{percent:g}, ms" for percent in _SHOWN), *rate, last]
    return table(head, rows, own=place)


def _fast_last(summary: Summary) -> float:
    """By the scenario's own figure; who answered nothing comes first."""
    speed = summary.throughput.per_s if summary.scenario == "offline" else -summary.latency_ns[50.0].value
    return -math.inf if math.isnan(speed) else speed


def _doubts(summary: Summary) -> list[str]:
    """What a reader has to know of the figures but what their cells say."""
    if summary.parts.adds_up:
        return []
    return [f"its stages add up to {summary.parts.excess:.1%} more than its latency"]


def _rate(summary: Summary) -> str:
    if summary.scenario == "server":
        rate, bound = (summary.settings.get(name, math.nan) for name in ("rate_per_s", "bound_ms"))
        late = "" if summary.keeps_bound else f"; not kept: {summary.late_share:.1%} were late"
        return f"{rate:.3g}<small>99 % within {decimals(bound)} ms{late}</small>"
    made = summary.throughput
    between = "" if math.isnan(made.low) else f"<small>{made.low:.3g} to {made.high:.3g}</small>"
    return f"{made.per_s:.3g}{between}"


def _percentile(found: Percentile) -> str:
    """Nanoseconds in, milliseconds out."""
    if math.isnan(found.value):
        return "–"
    if not found.is_enough:
        return f"{decimals(found.value / 1e6)}<small>too few samples</small>"
    return f"{decimals(found.value / 1e6)}<small>{decimals(found.low / 1e6)} to {decimals(found.high / 1e6)}</small>"


def inputs_in_words(inputs: Sequence[Input]) -> str:
    """How many there are, of what formats and sizes."""
    formats = ", ".join(f"{sum(i.format == kind for i in inputs)} {kind.upper()}" for kind in _formats(inputs))
    small, large = (choose(inputs, key=lambda i: i.image_hw[0] * i.image_hw[1]) for choose in (min, max))
    sizes = [f"{image.image_hw[1]}×{image.image_hw[0]}" for image in (small, large)]
    between = f"of {sizes[0]} pixels" if sizes[0] == sizes[1] else f"from {sizes[0]} to {sizes[1]} pixels"
    return f"{len(inputs)} image{'s' if len(inputs) > 1 else ''} ({formats}), {between}"


def _formats(inputs: Sequence[Input]) -> list[str]:
    return list(dict.fromkeys(image.format for image in inputs))


# ---- the waterfall ----------------------------------------------------------------------------------------


def waterfall_table(found: Waterfall) -> str:
    """A row for each step, with what it saves on top of the others and by itself."""
    head = ("", "P50, ms", "P95, ms", "P99, ms", "saves, ms", "by itself, ms")
    rows = []
    for place, step in enumerate(found.steps):
        name = escaped(("+ " if place else "") + step.name)
        for words in (step.about, step.agreement):
            name += f"<small>{escaped(words)}</small>" if words else ""
        figures = (decimals(step.p50_ms), _percentile(step.p95_ns), _percentile(step.p99_ns))
        rows.append((name, *figures, _saved(step.saved_ms), _saved(step.alone_ms)))
    low, high = found.speedup.low, found.speedup.high
    between = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
    together = f"together<small>{found.speedup.value:.2f} times as fast{between}</small>"
    rows.append((together, "", "", "", _saved(found.saved_ms), ""))
    return table(head, rows)


def _saved(saved: Interval | None) -> str:
    if saved is None:
        return ""
    if saved.low is None or saved.high is None:
        return f"{_signed(saved.value)}<small>too few rounds</small>"
    return f"{_signed(saved.value)}<small>{_signed(saved.low)} to {_signed(saved.high)}</small>"


def _signed(ms: float) -> str:
    return f"−{decimals(-ms)}" if ms < 0 else decimals(ms)
