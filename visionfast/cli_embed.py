"""The verb `embed`: a folder of images into a table of vectors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visionfast.cli_options import EngineArgument
from visionfast.errors import OptionError

if TYPE_CHECKING:
    from visionfast.embed_job import EmbedReport, Progress

__all__ = ["embed_verb"]


def embed_verb(
    engine: EngineArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of the images, and of folders with more of them.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The table, a Parquet file.")],
    features: Annotated[
        str | None,
        typer.Option(metavar="patch", help="A vector for each patch, too: an .npz an image, in <output>.patches/."),
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="Patches: in float16, at half the size.")] = False,
    normalise: Annotated[bool, typer.Option("--normalise", help="Scale every vector to a length of 1.")] = False,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all there are.")] = None,
    streams: Annotated[
        int | None,
        typer.Option(help="On a CPU, images at the same time. Default: what gives the most images a second."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: what the engine is for.")] = None,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Decode what is there of damaged files.")
    ] = False,
) -> None:
    """Embed a folder of images: a row each, with file, sha256 and vector. Exit code 1 if any was bad.

    It may be stopped at any moment, and goes on where it was with the same command. Later, that embeds what is new or
    has changed.
    """
    from visionfast.artifacts import find_engine, read_manifest
    from visionfast.embed_job import embed_folder
    from visionfast.embedder import Embedder
    from visionfast.loading import runs_here, throughput_streams
    from visionfast.preprocess.limits import DecodeLimits

    if features not in (None, "patch"):
        raise OptionError(f"--features {features}: expected patch, or nothing for a vector an image")
    if half and features is None:
        raise OptionError("--half: goes with --features patch")
    if not folder.is_dir():
        raise OptionError(f"{folder}: expected a folder with images")
    where = find_engine(engine, usable=runs_here)
    manifest = read_manifest(where, verify=True)
    if manifest.certificate.status == "failed":
        print(f"visionfast: {engine}: its certificate failed: it does not agree with PyTorch", file=sys.stderr)
    limits = DecodeLimits(allow_truncated=allow_truncated)
    if streams is None:
        streams = throughput_streams(manifest, threads=threads) if threads is None or threads > 0 else 1
    options: dict[str, Any] = {"threads": threads, "streams": streams, "device": device, "limits": limits}
    try:
        with Embedder.from_folder(where, manifest, **options) as embedder, _bar() as progress:
            report = embed_folder(
                embedder,
                folder,
                output,
                normalise=normalise,
                patches=None if features is None else "float16" if half else "float32",
                limits=limits,
                engine_name=f"{where.resolve().parent.name}/{where.resolve().name}",
                progress=progress,
            )
    except KeyboardInterrupt:
        print(f"visionfast: stopped; what is done is kept, and the same command goes on with {output}", file=sys.stderr)
        sys.exit(130)
    _tell(report, output)
    if report.bad:
        raise typer.Exit(1)


def _tell(report: EmbedReport, output: Path) -> None:
    for file, error in report.bad_files:
        print(f"visionfast: {file}: {error}", file=sys.stderr)
    if more := report.bad - len(report.bad_files):
        print(f"visionfast: … and {more} more; the column `error` has them all", file=sys.stderr)
    if not report.written:
        print(f"nothing new: {report.files} images are in {output}, {report.bad} of them bad")
        return
    rate = f" ({report.embedded / report.embedding_ns * 1e9:.1f} images/s)" if report.embedded else ""
    said = [f"{report.embedded} embedded{rate}", f"{report.bad} bad"]
    said += [f"{count} {word}" for count, word in ((report.kept, "kept"), (report.removed, "gone")) if count]
    print(f"{', '.join(said)}: {output}")


@contextlib.contextmanager
def _bar() -> Iterator[Progress | None]:
    """Done, images a second and time left, on stderr, where somebody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            measured = task.speed is not None and (task.elapsed or 0) > 1  # the first few may come all at once
            return Text(f"{task.speed:.1f} images/s" if measured else "– images/s")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeLeft())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task: TaskID | None = None
        shown = ""

        def progress(stage: str, done: int, total: int | None) -> None:
            nonlocal task, shown
            if task is None or stage != shown:
                if task is not None:
                    bar.remove_task(task)
                task, shown = bar.add_task(stage, total=total, completed=done), stage
            else:
                bar.update(task, completed=done)

        yield progress
