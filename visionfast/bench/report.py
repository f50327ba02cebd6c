"""A measuring run as one page of HTML that stands alone: no network, no scripts, plots inside.

Written for a person who was not there: what is missing or was disturbed first, then what was measured and on what, the
comparison, where the time goes, and at the end everything that the figures depend on.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visionfast.artifacts import atomic_write
from visionfast.bench import plots
from visionfast.bench.chapter import Chapter, pictures, slug
from visionfast.bench.load import QUIET
from visionfast.bench.records import Record, Scenario
from visionfast.bench.report_style import STYLE
from visionfast.bench.report_tables import (
    compared,
    escaped,
    facts,
    inputs_in_words,
    own_system,
    results_table,
    table,
    times,
    waterfall_table,
)
from visionfast.bench.statistics import percentile
from visionfast.bench.summary import summaries
from visionfast.errors import BackendUnavailableError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Chapter", "write_plots", "write_report"]

_SCENARIOS: dict[Scenario, str] = {
    "single-stream": "One image at a time: the next one comes when the last is answered.",
    "multi-stream": "Several images at once: the next ones come when all are answered, and the slowest one counts.",
    "server": "Images come at random times, whether or not anyone is free; waiting counts. Where no rate was named "
    "it is the highest that was found at which 99 % are answered within the bound; 0.9 of it where that did "
    "not last.",
    "offline": "All images are there from the beginning: what counts is how many are answered in a second. Who answers "
    "whole batches has no latency of an image by itself (–).",
}


def write_report(
    path: str | os.PathLike[str], measured: Record | Sequence[Chapter], *, title: str | None = None
) -> None:
    """Writes the page.

    Without matplotlib it has tables only, and says so.

    Args:
        path: of the HTML file.
        measured: a record, or chapters, at least one.
        title: of the page; default: what was measured.

    Raises:
        ArtifactError: the disk is full, or the folder cannot be written.
    """
    if isinstance(measured, Record):
        own = own_system(measured)
        model = own.details.get("model", own.name) if own else measured.systems[0].name
        measured = [Chapter(model, measured)]
    atomic_write(Path(path), _Page(measured, title).html().encode())


def write_plots(folder: Path, chapters: Sequence[Chapter]) -> list[Path]:
    """Every picture of the report as a PNG file in `folder`, and their paths.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
        ArtifactError: the disk is full, or the folder cannot be written.
    """
    written = []
    for chapter in chapters:
        for name, _, make in pictures(chapter):
            written.append(folder / f"{slug(chapter.title)}-{name}.png")
            atomic_write(written[-1], plots.png(make()))
    return written


class _Page:
    def __init__(self, chapters: Sequence[Chapter], title: str | None) -> None:
        self._chapters = chapters
        if title is None:
            title = "How fast is it? " + ", ".join(chapter.title for chapter in chapters)
        self._title = title
        self._numbers = itertools.count(1)
        self._without_plots = ""

    def html(self) -> str:
        body = "".join(self._chapter(i, chapter) for i, chapter in enumerate(self._chapters))
        head = self._head()  # last: it says what the rest came across
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escaped(self._title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"{head}{body}{_HOW_TO_READ}</main>\n</body>\n</html>\n"
        )

    # ---- the beginning ------------------------------------------------------------------------------------

    def _head(self) -> str:
        first = self._chapters[0].record
        machine = first.environment
        on = f"{machine.get('cpu', 'an unknown processor')}, {machine.get('cpus', '?')} processors"
        if machine.get("gpu", "none") != "none":
            on += f", {machine['gpu']}"
        created = first.created[:16].replace("T", " ")
        text = f"<h1>{escaped(self._title)}</h1>\n"
        text += f'<p class="muted">Measured on {escaped(on)}; {escaped(created)} UTC.</p>\n'
        text += self._remarks()
        if len(self._chapters) > 1:
            text += self._overview()
        return text

    def _remarks(self) -> str:
        """What is missing or was disturbed, before anything else."""
        remarks = []
        for chapter in self._chapters:
            shares = [r.others_cpu_share for r in chapter.records if r.others_cpu_share is not None]
            if shares and max(shares) > QUIET:
                remarks.append(
                    f"<strong>{escaped(chapter.title)}: disturbed, no verdict.</strong> Others took "
                    f"{max(shares):.0%} of the processors meanwhile; above {QUIET:.0%} figures say little."
                )
            elif not shares:
                remarks.append(
                    f"{escaped(chapter.title)}: this system does not tell what others took of the processors."
                )
            own = own_system(chapter.record)
            status = own.details.get("certificate", "passed") if own else "passed"
            if own and status == "failed":
                remarks.append(
                    f"<strong>{escaped(chapter.title)}: the engine's certificate failed</strong>: it does not agree "
                    "with PyTorch, so no speed-up is reported, and no waterfall."
                )
            elif status != "passed":
                remarks.append(f"{escaped(chapter.title)}: the engine's certificate is {escaped(status)}.")
            remarks += [
                f"{escaped(chapter.title)}: left out: {escaped(a.name)}: {escaped(a.reason)}" for a in chapter.absent
            ]
            remarks += [f"{escaped(chapter.title)}: {escaped(note)}" for note in chapter.notes]
        if self._without_plots:
            remarks.append(f"No plots: {escaped(self._without_plots)}")
        if not remarks:
            return '<p class="muted">Nothing is missing, and nothing disturbed the measurement.</p>\n'
        items = "".join(f"<li>{remark}</li>" for remark in dict.fromkeys(remarks))
        return f"<aside><strong>Before you read on</strong><ul>{items}</ul></aside>\n"

    def _overview(self) -> str:
        """All models in a table: one image at a time."""
        rows = []
        for i, chapter in enumerate(self._chapters):
            record, own = chapter.record, own_system(chapter.record)
            if own is None or (own.key, "single-stream") not in record.samples:
                continue
            samples = record.samples[own.key, "single-stream"].answered
            p50 = plots.decimals(percentile(samples.latency_ns, 50).value / 1e6)
            naive = next((s for s in record.systems if s.kind == "naive"), None)
            peers = [(compared(record, s.key, "single-stream"), s) for s in record.systems if s.kind == "peer"]
            best = min(((r, s) for r, s in peers if r), key=lambda one: one[0].value, default=None)
            rows.append(
                (
                    f'<a href="#{self._anchor(i)}">{escaped(chapter.title)}</a>',
                    escaped(own.details.get("precision", "").upper()),
                    p50,
                    times(compared(record, naive.key, "single-stream")) if naive else "",
                    f"{times(best[0])}<small>{escaped(best[1].name)}</small>" if best else "",
                )
            )
        head = ("model", "precision", "visionfast, P50 ms", "naive PyTorch<br>takes", "the fastest other<br>takes")
        said = (
            "One image at a time, from its encoded bytes to results in memory. A ratio is the median over pairs that "
        )
        said += "were measured side by side; below it, its 95 % interval."
        return table(head, rows, caption=said, left=2)

    # ---- a chapter ----------------------------------------------------------------------------------------

    def _anchor(self, index: int) -> str:
        return f"{slug(self._chapters[index].title)}-{index}"

    def _chapter(self, index: int, chapter: Chapter) -> str:
        record = chapter.record
        own = own_system(record)
        first = ' class="first"' if index == 0 else ""
        text = f'<h2 id="{self._anchor(index)}"{first}>{escaped(chapter.title)}</h2>\n'
        what = f"Asked about {escaped(inputs_in_words(record.inputs))}"
        if own:
            named = [own.details.get(name, "") for name in ("model", "precision", "backend", "runtime_version")]
            what = f"Engine: {escaped(' '.join(filter(None, named)))}. {what}"
        text += f"<p>{what}.</p>\n"
        drawn = {name: (said, make) for name, said, make in pictures(chapter)}
        for scenario in record.scenarios:
            text += f"<h3>{escaped(scenario)}</h3>\n<p>{_SCENARIOS[scenario]}</p>\n"
            headline = [s.headline for s in summaries(record) if own and (s.system, s.scenario) == (own.key, scenario)]
            text += "".join(f'<p class="lead">visionfast: {escaped(words)}</p>\n' for words in headline)
            text += results_table(record, scenario)
            text += self._picture(drawn.get(scenario))
            text += self._picture(drawn.get(f"{scenario}-stages"), "Where the time goes: mean of each stage.")
        text += self._waterfall(chapter, drawn)
        text += self._scaling(chapter, drawn)
        return text + self._details(chapter)

    def _waterfall(self, chapter: Chapter, drawn: Mapping[str, tuple[str, Callable[[], Figure]]]) -> str:
        found = chapter.waterfall
        if found is None:
            return ""
        text = "<h3>From naive PyTorch to visionfast</h3>\n"
        text += (
            f"<p>Each row adds one change to those above it, timed in turns in {found.rounds} rounds. What the changes "
            "save adds up to the whole difference; “by itself” is the same change made to naive PyTorch alone. Of "
            "several images at once it is the time for each of them; every single one takes longer.</p>\n"
        )
        text += self._picture(drawn.get("waterfall"))
        text += waterfall_table(found)
        text += self._picture(drawn.get("waterfall-stages"), "The steps by stages, means.")
        return text

    def _scaling(self, chapter: Chapter, drawn: Mapping[str, tuple[str, Callable[[], Figure]]]) -> str:
        if not chapter.curves:
            return ""
        text = "<h3>How the cost grows</h3>\n"
        for curve in chapter.curves:
            text += f"<p><strong>{escaped(curve.name)}.</strong> {escaped(curve.in_words)}</p>\n"
            picture = self._picture(drawn.get(f"scaling-{slug(curve.name)}"))
            text += picture.replace("<figure>", '<figure class="small">', 1)
        return text

    def _details(self, chapter: Chapter) -> str:
        record = chapter.record
        text = "<details><summary>Everything that the figures depend on</summary>\n"
        for one in chapter.records:
            text += facts(one.environment, "machine and versions")
            text += facts(one.command, "command") if one.command else ""
        for system in record.systems:
            if system.kind != "step" and system.details:
                text += facts(system.details, escaped(system.name))
        rows = [
            (
                escaped(i.name),
                escaped(i.format),
                f"{i.image_hw[1]}×{i.image_hw[0]}",
                str(i.n_bytes),
                escaped(i.sha256[:12]),
            )
            for i in record.inputs
        ]
        text += table(("image", "format", "pixels", "bytes", "sha256"), rows, caption="images")
        harness = ", ".join(f"{name} {spent / 1e3:.0f} µs" for name, spent in record.harness_ns.items())
        if harness:
            text += f'<p class="muted">The harness itself, of each request: {escaped(harness)}.</p>\n'
        return text + "</details>\n"

    def _picture(self, drawn: tuple[str, Callable[[], Figure]] | None, caption: str = "") -> str:
        if drawn is None or self._without_plots:
            return ""
        said, make = drawn
        try:
            picture = plots.svg(make(), said, f"f{next(self._numbers)}")
        except BackendUnavailableError as error:
            self._without_plots = str(error)
            return ""
        below = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
        return f"<figure>{picture}{below}</figure>\n"


_HOW_TO_READ = """<h2>How to read this</h2>
<ul>
<li>Everybody gets the same encoded images and is done when the results are in host memory: decoding, resizing and
post-processing are inside every figure, but for a bare engine, which gets ready tensors.</li>
<li>P50 is the middle request, P95 and P99 what 95 and 99 of 100 do not exceed. Below a figure is the interval that the
true one is in, in 95 of 100 such measurements; “too few samples” means that there is none.</li>
<li>Systems take turns in rounds of a random order. Ratios are of pairs from the same round, so what slows the machine
down for a while is in both.</li>
<li>A difference whose interval includes 0 (a ratio’s: 1) is none.</li>
</ul>
"""
