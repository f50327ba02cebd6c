"""What a report says of one model, and the pictures that belong to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from visionfast.bench import figures
from visionfast.bench.baselines import Absent
from visionfast.bench.breakdown import breakdown
from visionfast.bench.records import Record, Scenario
from visionfast.bench.report_tables import NOT_COMPARED, has_latencies, own_system
from visionfast.bench.scaling import Curve
from visionfast.bench.summary import query_latency_ns
from visionfast.bench.waterfall import Waterfall, waterfall
from visionfast.terminal import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Chapter", "pictures", "slug"]


@dataclass(frozen=True, slots=True, eq=False)
class Chapter:
    """What a report says of one model.

    Attributes:
        title: of the chapter.
        record: visionfast and those that it is compared with; its steps, where it has some, make the waterfall.
        steps: a record of the waterfall's steps, where they were measured by themselves.
        absent: who could not take part.
        curves: how the cost grows (`bench.scaling`).
        notes: what the reader has to know beside that, a sentence each.
    """

    title: str
    record: Record
    steps: Record | None = None
    absent: Sequence[Absent] = ()
    curves: Sequence[Curve] = ()
    notes: Sequence[str] = ()

    @property
    def waterfall(self) -> Waterfall | None:
        """That of `steps`, or of the record itself; `None` also of an engine whose certificate failed."""
        own = own_system(self.record)
        if own is not None and own.details.get("certificate") == "failed":
            return None
        return next(filter(None, map(waterfall, reversed(self.records))), None)

    @property
    def records(self) -> tuple[Record, ...]:
        return (self.record, self.steps) if self.steps else (self.record,)


def slug(text: str) -> str:
    """For ids and file names: letters, digits and hyphens."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower())
    return "-".join(filter(None, kept.split("-"))) or "model"


def pictures(chapter: Chapter) -> Iterator[tuple[str, str, Callable[[], Figure]]]:
    """Name, what it shows, and how it is drawn."""
    record = chapter.record
    for scenario in record.scenarios:
        run = [s for s in record.systems if s.kind not in NOT_COMPARED and (s.key, scenario) in record.samples]
        answered = {s.name: record.samples[s.key, scenario].answered for s in run}
        alone = {s.name for s in run if has_latencies(s)}
        # As the table has them: in multi-stream a group is answered when its last image is.
        grouped = scenario == "multi-stream"
        latency_ms = {
            name: (query_latency_ns(samples) if grouped else samples.latency_ns) / 1e6
            for name, samples in answered.items()
            if len(samples) and name in alone
        }
        if latency_ms:
            said = f"latencies in {scenario}, each {'group' if grouped else 'request'} a dot, a row for each system"
            yield f"{scenario}", said, partial(figures.distribution_figure, latency_ms)
        parts = {name: _parts_ms(record, s.key, scenario) for name, s in zip(answered, run, strict=True)}
        parts = {name: one for name, one in parts.items() if len(one) > 1 and name in alone}
        if parts:
            said = f"mean latency in {scenario} by stages"
            yield f"{scenario}-stages", said, partial(figures.stage_figure, _slow_first(parts))
    found = chapter.waterfall
    if found is not None:
        said = "what each change saves, from naive PyTorch to visionfast"
        yield "waterfall", said, partial(figures.waterfall_figure, found)
        stages = {step.name: step.stage_ms for step in found.steps}
        yield "waterfall-stages", "the steps' mean latency by stages", partial(figures.stage_figure, stages)
    for curve in chapter.curves:
        yield f"scaling-{slug(curve.name)}", curve.in_words, curve.figure


def _parts_ms(record: Record, key: str, scenario: Scenario) -> dict[str, float]:
    parts_ns = breakdown(record.samples[key, scenario]).parts_ns
    return {one_line(part): ns / 1e6 for part, ns in parts_ns.items() if ns > 0}


def _slow_first(parts: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    return dict(sorted(parts.items(), key=lambda item: -sum(item[1].values())))
