"""The verb `verify`: an engine's average precision beside PyTorch's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from visionfast.cli_options import EngineArgument
from visionfast.errors import OptionError
from visionfast.terminal import one_line

if TYPE_CHECKING:
    from visionfast.verify_report import Comparison, VerifyReport

__all__ = ["verify_verb"]

_SHOWN = 20  # of bad images; --json has them all


def verify_verb(
    engine: EngineArgument,
    dataset: Annotated[
        Path, typer.Option(metavar="DIR", help="In COCO's format: annotations/instances_*.json; or that file.")
    ],
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of the images, where they are in none of the usual folders.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="The checkpoint that it was built from; default: found under models/ by its sha256."),
    ] = None,
    reference: Annotated[
        str,
        typer.Option(help="eager, the checkpoint in the engine's place; or naive, other code for everything."),
    ] = "eager",
    limit: Annotated[int | None, typer.Option(help="Only the first so many images.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Points of mAP50-95 that the two may be apart. Default: 0.5.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="File for the whole report; - is stdout.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all there are.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: what the engine is for.")] = None,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Decode what is there of damaged files.")
    ] = False,
    trust_checkpoint: Annotated[
        bool,
        typer.Option("--trust-checkpoint", help="Load a pickle that may RUN anything; only if you trust it."),
    ] = False,
) -> None:
    """Average precision of an engine, and of PyTorch, on a data set. Exit code 1 if they differ by more than the
    tolerance, if the engine's certificate failed, or if an image was bad.
    """
    from visionfast.embed_progress import shown
    from visionfast.predict_output import json_lines, write_line
    from visionfast.preprocess.limits import DecodeLimits
    from visionfast.verify_run import REFERENCES, TOLERANCE_POINTS, verify

    known = {name: name for name in REFERENCES}
    if reference not in known:
        raise OptionError(f"--reference {reference}: expected {' or '.join(known)}")
    _check_json(json, dataset)
    with json_lines(json) as lines:
        with shown() as progress:
            report = verify(
                engine,
                dataset,
                images=images,
                weights=weights,
                reference=known[reference],
                limit=limit,
                tolerance_points=TOLERANCE_POINTS if tolerance is None else tolerance,
                threads=threads,
                device=device,
                limits=DecodeLimits(allow_truncated=allow_truncated),
                trust_checkpoint=trust_checkpoint,
                progress=progress,
            )
        if lines is not None:
            write_line(lines, report.as_dict(), json or "")
    if json != "-":
        _show(report)
    _complain(report)
    if report.bad_images or not report.passed:
        raise typer.Exit(1)


def _check_json(target: str | None, dataset: Path) -> None:
    """Raises `OptionError` where the report would take the place of what is measured."""
    from visionfast.artifacts import MODEL_SUFFIXES, is_of_an_engine
    from visionfast.image_files import IMAGE_SUFFIXES, same_file
    from visionfast.verify_dataset import annotation_file

    if target in (None, "-", ""):
        return
    path = Path(str(target))
    if path.suffix.lower() in {*IMAGE_SUFFIXES, *MODEL_SUFFIXES}:
        raise OptionError(f"--json {target}: expected a file for JSON, got the name of an image or of weights")
    if is_of_an_engine(path):
        raise OptionError(f"--json {target}: expected a file elsewhere, got one in an engine's folder")
    if same_file(path, annotation_file(dataset)):
        raise OptionError(f"--json {target}: would overwrite the data set's annotations; name another file")


def _show(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Console(highlight=False, soft_wrap=True)
    print(f"{one_line(report.engine)}: {report.backend}, {report.precision}, certificate {report.certificate}")
    print(f"{one_line(report.annotations)}: {report.images} images, {report.objects} objects")
    print(f"reference: {report.reference}")
    table = Table("points", "engine", "PyTorch", "difference", "95 % of resamples", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, compared in report.comparisons.items():
        for row in _rows(kind, compared):
            table.add_row(*row)
    out.print(table)
    print("passed" if report.passed else "failed")


def _rows(kind: str, compared: Comparison) -> list[tuple[str, ...]]:
    names = {
        "ap": "mAP50-95",
        "ap50": "mAP50",
        "ap75": "mAP75",
        "ap_small": "small",
        "ap_medium": "medium",
        "ap_large": "large",
    }
    intervals = {"ap": compared.interval95, "ap50": compared.interval95_ap50}
    rows: list[tuple[str, ...]] = []
    for field, name in names.items():
        ours, theirs = getattr(compared.engine, field), getattr(compared.reference, field)
        apart = None if ours is None or theirs is None else ours - theirs
        interval = intervals.get(field)
        between = "" if interval is None else f"{_points(interval[0], '+')} to {_points(interval[1], '+')}"
        rows.append((f"{kind} {name}", _points(ours), _points(theirs), _points(apart, "+"), between))
    return rows


def _points(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{round(100 * value, 2) + 0.0:{sign}.2f}"  # -0.0 + 0.0 is 0.0


def _complain(report: VerifyReport) -> None:
    complaints = [f"{bad.file}: {bad.reason}" for bad in report.bad_images[:_SHOWN]]
    if (more := len(report.bad_images) - _SHOWN) > 0:
        complaints.append(f"… and {more} more; --json has them all")
    if report.bad_images:
        total = report.images + len(report.bad_images)
        complaints.append(f"{len(report.bad_images)} of {total} images were bad and are left out, on both sides")
    for names, whose in (
        (report.classes_without_category, "the data set has no category for the engine's"),
        (report.categories_without_class, "the engine has no class for the data set's"),
    ):
        if names:
            listed = ", ".join(one_line(name) for name in names[:8]) + (", …" if len(names) > 8 else "")
            complaints.append(f"{whose} {listed} ({len(names)}): left out")
    if report.task == "segment" and report.masks is None:
        complaints.append("the data set has no segmentations: only boxes were compared")
    if report.certificate not in ("passed", "failed"):
        complaints.append(f"certificate: {report.certificate}; `visionfast certify` runs it")
    for complaint in (*complaints, *report.doubts, *report.reasons):
        print(f"visionfast: {one_line(complaint)}", file=sys.stderr)
