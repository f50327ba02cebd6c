"""A measuring run on the terminal."""

from __future__ import annotations

import math
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from visionfast.bench.comparison import time_ratio
from visionfast.bench.gate import Verdict
from visionfast.bench.load import QUIET
from visionfast.bench.records import Record, Scenario
from visionfast.bench.statistics import Percentile
from visionfast.bench.summary import PERCENTS, Summary, summaries
from visionfast.terminal import one_line

__all__ = ["show_record", "show_verdict"]


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


def show_record(record: Record) -> None:
    """A table for each scenario, where the time went, and what to doubt."""
    out = _console()
    facts = record.environment
    gpu = "" if facts.get("gpu", "none") == "none" else f", {facts['gpu']}"
    out.print(f"{facts.get('cpu', 'unknown processor')}, {facts.get('cpus', '?')} processors{gpu}", markup=False)
    names = ", ".join(f"{i.name} ({i.image_hw[1]}×{i.image_hw[0]})" for i in record.inputs)
    images = f"{len(record.inputs)} image{'' if len(record.inputs) == 1 else 's'}"
    out.print(f"{images}: {one_line(names)}", markup=False)
    of_scenario: dict[Scenario, list[Summary]] = {}
    for summary in summaries(record):
        of_scenario.setdefault(summary.scenario, []).append(summary)
    for scenario, found in of_scenario.items():
        out.print()
        for summary in found:
            if record.system(summary.system).kind not in ("control", "bare", "null"):
                out.print(
                    f"{scenario}, {one_line(record.system(summary.system).name)}: {summary.headline}", markup=False
                )
        out.print(_table(record, found))
        for summary in found:
            if len(parts := summary.parts.parts_ns) > 2:
                shown = ", ".join(f"{name} {_ms(spent)}" for name, spent in parts.items())
                shown = one_line(shown)  # a stage is what a system calls so
                out.print(f"  {summary.system}: mean {_ms(summary.parts.total_ns)} ms = {shown}", markup=False)
            if summary.remarks and record.system(summary.system).kind != "control":
                out.print(f"  {summary.system}: {'; '.join(summary.remarks)}", markup=False)
        if line := _over_bare(record, scenario):
            out.print(line, markup=False)
    out.print()
    out.print(_disturbance(record), markup=False)
    shown = ", ".join(f"{scenario} {spent / 1e3:.1f}" for scenario, spent in record.harness_ns.items())
    out.print(f"the harness itself, µs a request: {shown}", markup=False)


def _table(record: Record, found: list[Summary]) -> Table:
    percents = [f"P{percent:g} ms" for percent in PERCENTS]
    table = Table("", "requests", *percents, "images/s", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for summary in found:
        shown = [_percentile(summary.latency_ns[percent]) for percent in PERCENTS]
        requests = str(len(record.samples[summary.system, summary.scenario]))
        name = Text(one_line(record.system(summary.system).name))  # no markup
        table.add_row(name, requests, *shown, f"{summary.throughput.per_s:.1f}")
    return table


def _percentile(found: Percentile) -> str:
    if math.isnan(found.value):
        return "–"
    return _ms(found.value) + ("" if found.is_enough else " ?")


def _ms(spent_ns: float) -> str:
    return f"{spent_ns / 1e6:.2f}"


def _over_bare(record: Record, scenario: Scenario) -> str:
    """What visionfast adds to its engine; nothing of an engine that is not right."""
    if "visionfast" not in {system.key for system in record.systems}:
        return ""
    if record.system("visionfast").details.get("certificate") == "failed":
        return ""
    if (found := time_ratio(record, "visionfast", "bare", scenario)) is None:
        return ""
    between = "" if math.isnan(found.low) else f" ({found.low:.3f}–{found.high:.3f})"
    if scenario == "offline":
        return f"  bare engine / visionfast, images/s: {found.value:.3f}{between}, {found.rounds} rounds"
    return f"  visionfast / bare engine: {found.value:.3f}{between}, {found.pairs} pairs"


def _disturbance(record: Record) -> str:
    share = record.others_cpu_share
    if share is None:
        return "what others took of the processors is not known here"
    verdict = "" if share <= QUIET else f": disturbed, no figure here says anything (at most {QUIET:.0%})"
    return f"others took {share:.1%} of the processors{verdict}"


def show_verdict(verdict: Verdict, name: str) -> None:
    """Every question's answer, and the verdict in one line."""
    out = _console()
    table = Table(escape("against " + one_line(name)), "part", "ratio", "at least", "limit", "", box=None)
    for column in table.columns[2:5]:
        column.justify = "right"
    for f in verdict.findings:
        mark = "slower" if f.is_slower and not verdict.withheld else ""
        table.add_row(f.scenario, Text(one_line(f.part)), f"{f.ratio:.3f}", f"{f.low:.3f}", f"{f.limit:.2f}", mark)
    out.print(table)
    for note in verdict.notes:
        out.print(f"note: {one_line(note)}", markup=False)
    stage = f"; it is {one_line(verdict.stage)}" if verdict.status == "slower" and verdict.stage else ""
    out.print(f"{verdict.status}{stage}", markup=False)
