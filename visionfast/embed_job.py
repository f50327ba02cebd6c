"""A folder of images → a table of vectors: a batch job that may be stopped at any moment and goes on where it was.

What the table of an earlier run has, and what did not change since, is kept; the rest is embedded; what is gone is
dropped. A file is known by its path, its size and the time that it was last written. `visionfast.embed_run` does it;
here is what may be asked, and whether it fits what is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Literal, NoReturn

from visionfast._version import __version__
from visionfast.embed_journal import Journal, job_settings, journal_path
from visionfast.embed_patches import PatchFolder
from visionfast.embed_run import EmbedReport, Progress, Run
from visionfast.embed_table import TableInfo, engine_identity, read_info
from visionfast.embedder import Embedder
from visionfast.errors import ArtifactError, ManifestError, OptionError
from visionfast.image_files import IMAGE_SUFFIXES, image_files, name_bytes, printable, shown_name
from visionfast.preprocess.limits import DecodeLimits
from visionfast.terminal import one_line

__all__ = ["EmbedReport", "Progress", "begun", "check_output", "embed_folder"]

_FIXED = ("engine", "normalised", "patches", "limits")
"""Of a table's description, what all of its rows have in common."""

_OF_OTHERS = IMAGE_SUFFIXES | frozenset(
    [
        *(".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx", ".arrow", ".feather", ".npy", ".npz", ".pkl"),
        *(".pt", ".pth", ".safetensors", ".h5", ".hdf5", ".db", ".sqlite", ".zip", ".gz", ".tar"),
    ]
)
"""Endings that promise something else than Parquet."""


def embed_folder(
    embedder: Embedder,
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    normalise: bool = False,
    patches: Literal["float32", "float16"] | None = None,
    limits: DecodeLimits | None = None,
    engine_name: str | None = None,
    progress: Progress | None = None,
    **unknown: NoReturn,
) -> EmbedReport:
    """Embeds every image file below a folder, and writes their vectors to a table (`visionfast.embed_table`).

    A file that cannot be answered is a row with an error, and harms no other; of a folder that cannot be read the rows
    that were there are kept, and the report says so. Called again, it embeds what is new or
    has changed, drops what is gone, and leaves the table as it is where there is neither. A file whose error lies in
    its bytes is tried again once it has changed, one that could not be read every time.

    Args:
        embedder: from an engine's folder.
        folder: of the images; links to folders are not followed.
        output: the table; `<output>.journal` beside it lives as long as the job is unfinished.
        normalise: scale every vector to a length of 1.
        patches: write dense features too, in this dtype (`visionfast.embed_patches`).
        limits: those that the embedder was opened with.
        engine_name: where the engine is under engines/, `<model>/<variant>`, for the table's description and for
            `visionfast search`; default: the model's name.
        progress: is told how far it is.

    Raises:
        OptionError: no folder, or one without images; the table's name is too long, or ends like that of another
            format; the table or the journal there is that of another engine, of other options or of another folder; or
            another job is writing it.
        ArtifactError: the table, the journal or a file of dense features cannot be read or written.
        BackendError: the runtime failed.
        KeyboardInterrupt: it was stopped. After this and every other error what was done is kept, and the same call
            goes on from there.
    """
    if unknown:
        expected = "normalise, patches, limits, engine_name or progress"
        raise TypeError(f"embed_folder() got an unexpected keyword argument {min(unknown)!r}; expected {expected}")
    if patches not in (None, "float32", "float16"):
        raise OptionError(f"patches: expected 'float32', 'float16' or None, got {patches!r}")
    table, root = Path(os.path.realpath(output)), Path(folder)
    check_output(output)
    unread: list[tuple[bytes, str]] = []
    if next(image_files(root, unread=lambda *told: unread.append(told)), None) is None:
        for path, reason in unread:
            raise OptionError(f"{printable(os.fsencode(root) + b'/' + path)}: cannot be read ({reason})")
        raise OptionError(f"{printable(os.fsencode(root))}: expected a folder with images, found none in it")
    info = _info(embedder, root, table, engine_name, limits or DecodeLimits(), normalise, patches)
    dense = PatchFolder(table, patches) if patches is not None else None
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(f"{table.parent}: cannot be written ({error.strerror})") from error
    with Journal(table) as journal:
        before = read_info(table) if table.exists() else None
        if before is not None:
            _check_same(info, before, table, table.parent)
        if journal.settings is not None:
            _check_same(info, _of_journal(journal), journal.path, table.parent)
        return Run(embedder, root, table, before, info, dense, journal, progress or _silent)()


def check_output(output: str | os.PathLike[str]) -> None:
    """Raises `OptionError` unless a table may be written there, as far as its name says."""
    path = Path(output)
    if not os.fspath(output) or (os.path.exists(path) and not path.is_file()):  # noqa: PTH110 (raises for a long name)
        raise OptionError(f"{os.fspath(output)!r}: expected a file to write the table to")
    table = Path(os.path.realpath(output))
    longest = journal_path(journal_path(table)).name  # SQLite's own, beside the journal
    with contextlib.suppress(OSError):
        most = os.pathconf(next(each for each in table.parents if os.path.isdir(each)), "PC_NAME_MAX")  # noqa: PTH112
        if (more := len(os.fsencode(longest)) - most) > 0:
            raise OptionError(
                f"{printable(os.fsencode(path))}: the name is too long, with what is written beside it; "
                f"make it shorter by {more} bytes"
            )
    if path.suffix.lower() in _OF_OTHERS:
        better = printable(os.fsencode(path.with_suffix(".parquet")))
        raise OptionError(f"{printable(os.fsencode(path))}: the table is a Parquet file; call it {better}")


def begun(output: str | os.PathLike[str]) -> TableInfo | None:
    """What the table that is there says of itself, or the journal of an unfinished one; `None` where neither can."""
    table = Path(os.path.realpath(output))
    with contextlib.suppress(ArtifactError, ManifestError):
        if table.is_file():
            return read_info(table)
        if (settings := job_settings(table)) is not None:
            return TableInfo.from_json(settings)
    return None


def _silent(stage: str, done: int, total: int | None) -> None:
    pass


def _info(
    embedder: Embedder,
    root: Path,
    table: Path,
    engine_name: str | None,
    limits: DecodeLimits,
    normalise: bool,
    patches: Literal["float32", "float16"] | None,
) -> TableInfo:
    spec = embedder.spec
    if embedder.manifest is None:
        raise OptionError(f"{spec.name}: expected an embedder of an engine's folder; Embedder.open makes one")
    # Seen from the table, so that both can be moved together.
    seen = os.path.relpath(os.path.realpath(root), table.parent)
    return TableInfo(
        model=spec.name,
        architecture=spec.architecture,
        license=spec.license,
        engine=engine_identity(embedder.manifest),
        engine_name=engine_name or spec.name,
        preprocess=spec.preprocess,
        limits=limits,
        dim=embedder.dim,
        normalised=normalise,
        patches=patches,
        folder=shown_name(os.fsencode(seen)),
        visionfast=__version__,
    )


def _of_journal(journal: Journal) -> TableInfo:
    try:
        return TableInfo.from_json(journal.settings or "")
    except ManifestError as error:
        raise ArtifactError(f"{journal.path}: {error}; delete it to begin again, without what is in it") from None


def _check_same(info: TableInfo, there: TableInfo, path: Path, home: Path) -> None:
    """Raises `OptionError` unless what is at `path` may be added to."""
    remedy = "name another output, or delete it"
    for name in _FIXED:
        if getattr(there, name) != getattr(info, name):
            was, asked = _told_apart(name, there, info)
            raise OptionError(f"{path}: made {was}, this is {asked}; {remedy}")
    # A folder that is not where it was may have been moved; one that still is there is another one.
    folder = home / os.fsdecode(name_bytes(there.folder))
    if there.folder != info.folder and os.path.exists(folder):  # noqa: PTH110 (pathlib's raises for a long name)
        shown = printable(os.fsencode(os.path.normpath(folder)))
        raise OptionError(f"{path}: made of {shown}, this is another folder; {remedy}")


def _told_apart(name: str, there: TableInfo, info: TableInfo) -> tuple[str, str]:
    """How one was made and the other is to be, as the command line says it."""
    if name == "engine":
        names = [one_line(one.engine_name) for one in (there, info)]
        if names[0] == names[1]:  # built anew, or brought to another place
            names = [f"{one_line(one.engine_name)} ({one_line(one.engine[:12])}…)" for one in (there, info)]
        return f"with the engine {names[0]}", f"with {names[1]}"
    if name == "normalised":
        return ("with --normalise", "without it") if there.normalised else ("without --normalise", "with it")
    if name == "patches":
        if there.patches is not None and info.patches is not None:
            return f"with patches in {there.patches}", f"with {info.patches}"
        return ("with --features patch", "without it") if there.patches else ("without --features patch", "with it")
    was, asked = (dataclasses.asdict(one.limits) for one in (there, info))
    if was.pop("allow_truncated") != asked.pop("allow_truncated"):
        option = "--allow-truncated"
        return (f"with {option}", "without it") if there.limits.allow_truncated else (f"without {option}", "with it")
    before, now = (", ".join(f"{k} {v}" for k, v in one.items() if was[k] != asked[k]) for one in (was, asked))
    return f"with {before}", f"with {now}"
