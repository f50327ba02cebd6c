"""The verb `embed`: a folder of images into a table of vectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visionfast.cli_options import EngineArgument
from visionfast.errors import OptionError
from visionfast.terminal import one_line

if TYPE_CHECKING:
    from visionfast.embed_job import EmbedReport

__all__ = ["embed_verb"]


def embed_verb(
    engine: EngineArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Of the images; those of folders below it too.")],
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
    """Embed a folder of images: a table with a vector for each. Exit code 1 if any was bad, or a folder
    in DIR could not be read.

    It may be stopped at any moment, and goes on where it was with the same command. Later, that embeds what is new or
    has changed.
    """
    from visionfast.artifacts import find_engine, read_manifest
    from visionfast.embed_job import begun, check_output, embed_folder
    from visionfast.embed_progress import shown
    from visionfast.embed_table import engine_identity
    from visionfast.embedder import Embedder
    from visionfast.loading import runs_here, throughput_streams
    from visionfast.preprocess.limits import DecodeLimits

    if features not in (None, "patch"):
        raise OptionError(f"--features {features}: expected patch, or nothing for a vector an image")
    if half and features is None:
        raise OptionError("--half: goes with --features patch")
    if not folder.is_dir():
        raise OptionError(f"{folder}: expected a folder with images")
    check_output(output)
    before = begun(output)
    where = find_engine(
        engine, usable=runs_here, prefer=lambda one: before is not None and engine_identity(one) == before.engine
    )
    manifest = read_manifest(where, verify=True)
    if manifest.certificate.status == "failed":
        told = f"{engine}: its certificate failed: it does not agree with PyTorch"
        print(f"visionfast: {one_line(told)}", file=sys.stderr)
    limits = DecodeLimits(allow_truncated=allow_truncated)
    if streams is None:
        streams = throughput_streams(manifest, threads=threads) if threads is None or threads > 0 else 1
    options: dict[str, Any] = {"threads": threads, "streams": streams, "device": device, "limits": limits}
    try:
        with Embedder.from_folder(where, manifest, **options) as embedder, shown() as progress:
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
        told = f"stopped; what is done is kept, and the same command goes on with {output}"
        print(f"visionfast: {one_line(told)}", file=sys.stderr)
        sys.exit(130)
    _tell(report, output)
    if report.bad or report.unread:
        raise typer.Exit(1)


def _tell(report: EmbedReport, output: Path) -> None:
    for folder, reason in report.unread_folders:
        print(
            f"visionfast: {folder}: cannot be read ({one_line(reason)}); nothing in it was looked at", file=sys.stderr
        )
    if more := report.unread - len(report.unread_folders):
        print(f"visionfast: … and {more} more folders that cannot be read", file=sys.stderr)
    where = one_line(str(output))
    if not report.written:
        why = ", as the column `error` says" if report.bad else ""
        print(f"nothing new: {report.files} images are in {where}, {report.bad} of them bad{why}")
        return
    for file, error in report.bad_files:
        print(f"visionfast: {file}: {one_line(error)}", file=sys.stderr)
    if more := report.bad - len(report.bad_files):
        print(f"visionfast: … and {more} more; the column `error` has them all", file=sys.stderr)
    rate = f" ({report.embedded / report.embedding_ns * 1e9:.1f} images/s)" if report.embedded else ""
    said = [f"{report.embedded} embedded{rate}", f"{report.bad} bad"]
    said += [f"{count} {word}" for count, word in ((report.kept, "kept"), (report.removed, "gone")) if count]
    print(f"{', '.join(said)}: {where}")
