"""A folder of images → a table of vectors: a batch job that may be stopped at any moment and goes on where it was.

What the table of an earlier run has, and what did not change since, is kept; the rest is embedded; what is gone is
dropped. A file is known by its path, its size and the time that it was last written. `visionfast.embed_run` does it;
here is what may be asked, and whether it fits what is there.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from visionfast._version import __version__
from visionfast.embed_journal import Journal
from visionfast.embed_patches import PatchFolder
from visionfast.embed_run import EmbedReport, Progress, Run
from visionfast.embed_table import TableInfo, engine_identity, read_info
from visionfast.embedder import Embedder
from visionfast.errors import ArtifactError, ManifestError, OptionError
from visionfast.image_files import image_files, name_bytes, printable, shown_name
from visionfast.preprocess.limits import DecodeLimits

__all__ = ["EmbedReport", "Progress", "embed_folder"]

_FIXED = ("engine", "normalised", "patches", "limits")
"""Of a table's description, what all of its rows have in common."""


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
) -> EmbedReport:
    """Embeds every image file below a folder, and writes their vectors to a table (`visionfast.embed_table`).

    A file that cannot be answered is a row with an error, and harms no other. Called again, it embeds what is new or
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
        OptionError: no folder, or one without images; the table or the journal there is that of another engine, of
            other options or of another folder; or another job is writing it.
        ArtifactError: the table, the journal or a file of dense features cannot be read or written.
        BackendError: the runtime failed.
        KeyboardInterrupt: it was stopped. After this and every other error what was done is kept, and the same call
            goes on from there.
    """
    if patches not in (None, "float32", "float16"):
        raise OptionError(f"patches: expected 'float32', 'float16' or None, got {patches!r}")
    table, root = Path(os.path.realpath(output)), Path(folder)
    if not os.fspath(output) or (table.exists() and not table.is_file()):
        raise OptionError(f"{os.fspath(output)!r}: expected a file to write the table to")
    if next(image_files(root), None) is None:
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
        raise ArtifactError(f"{journal.path}: {error}; delete it to begin again") from None


def _check_same(info: TableInfo, there: TableInfo, path: Path, home: Path) -> None:
    """Raises `OptionError` unless what is at `path` may be added to."""
    remedy = "name another output, or delete it"
    for name in _FIXED:
        if getattr(there, name) != getattr(info, name):
            was, asked = _told_apart(name, there, info)
            raise OptionError(f"{path}: made with {was}, this is with {asked}; {remedy}")
    # A folder that is not where it was may have been moved; one that still is there is another one.
    folder = home / os.fsdecode(name_bytes(there.folder))
    if there.folder != info.folder and folder.exists():
        shown = printable(os.fsencode(os.path.normpath(folder)))
        raise OptionError(f"{path}: made of {shown}, this is another folder; {remedy}")


def _told_apart(name: str, there: TableInfo, info: TableInfo) -> tuple[str, str]:
    if name == "engine":
        was, asked = (f"the engine {one.engine_name} ({one.engine:.12}…)" for one in (there, info))
        return was, asked
    if name == "limits":
        limits = [dataclasses.asdict(one.limits) for one in (there, info)]
        was, asked = (", ".join(f"{k} {v}" for k, v in one.items() if limits[0][k] != limits[1][k]) for one in limits)
        return was, asked
    return f"{name} {getattr(there, name)}", f"{name} {getattr(info, name)}"
