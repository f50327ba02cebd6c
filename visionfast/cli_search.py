"""The verb `search`: the images of a table that are nearest to others, as words, JSON and a contact sheet."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visionfast.errors import ArtifactError, ImageError, OptionError
from visionfast.image_files import name_bytes, printable, same_file, shown_name
from visionfast.preprocess.formats import DAMAGE_REMEDY, WHOLE_FILE
from visionfast.terminal import one_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from visionfast.embed_table import TableInfo
    from visionfast.embedder import Embedder
    from visionfast.embedding_search import Hit
    from visionfast.types import EngineManifest

__all__ = ["search_verb"]

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
"""Of contact sheets."""


def search_verb(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="That `visionfast embed` wrote.")],
    queries: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE|DIR|GLOB...", help="What to look for the like of; in a DIR, not below it."),
    ],
    k: Annotated[int, typer.Option("-k", help="Images for each query.")] = 10,
    save: Annotated[Path | None, typer.Option(help="File for a contact sheet: .png, .jpg or .webp.")] = None,
    json: Annotated[str | None, typer.Option(help="File for one JSON line a query; - is stdout.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder that the table's files are below. Default: the one that was embedded.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="That the table was made with, as for embed. Default: by the name in the table."),
    ] = None,
    exclude_self: Annotated[
        bool, typer.Option("--exclude-self", help="Leave out the query itself: the same bytes, or the same file.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all there are.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: what the engine is for.")] = None,
) -> None:
    """Find the images of a table that are nearest to others. By cosine, exact; exit code 1 if a query was bad.

    An image that is in the table is found by its sha256, and takes no engine.
    """
    from visionfast.embedding_search import search, table_info
    from visionfast.predict import expand, tell_overlooked
    from visionfast.predict_output import json_lines, write_line

    if k < 1:
        raise OptionError(f"-k {k}: expected at least 1")
    if save is not None and save.suffix.lower() not in _SUFFIXES:
        raise OptionError(f"--save {save}: expected a file that ends in {', '.join(_SUFFIXES)}")
    paths = expand(queries)
    info = table_info(table)
    folder = _embedded_folder(table, info) if images is None else images
    targets = [("--save", save), ("--json", None if json in (None, "-") else Path(json or ""))]
    _check_targets(targets, table, paths, [_embedded_folder(table, info), folder])
    tell_overlooked(queries)
    digests = _digests(paths, info)
    vectors = _vectors(table, info, digests, engine, {"threads": threads, "device": device})
    answered = [path for path in paths if not isinstance(vectors[path], ImageError)]
    hits: dict[Path, list[Hit]] = {}
    if answered:
        own = _own(table, folder, answered, digests) if exclude_self else None
        hits = dict(zip(answered, search(table, _stacked(vectors, answered), k, exclude=own), strict=True))

    spoken = sys.stderr if json == "-" else sys.stdout
    with json_lines(json) as lines:
        for path in paths:
            error = vectors[path]
            if isinstance(error, ImageError):
                text, reason = (
                    _shown(each).replace(DAMAGE_REMEDY, WHOLE_FILE)  # there is no such option here
                    for each in (error, error.reason)
                )
                print(f"visionfast: {text}", file=sys.stderr)
                record: dict[str, Any] = {"error": {"kind": error.kind, "message": reason}}
            else:
                print(_sentence(path, hits[path]), file=spoken)
                record = {"nearest": [_record(hit) for hit in hits[path]]}
            if lines is not None:
                write_line(lines, {"file": _shown(path), **record}, json or "")
    if save is not None and answered:
        _save(save, [(path, hits.get(path, []), vectors[path]) for path in paths], folder)
    if len(answered) < len(paths):
        raise typer.Exit(1)


def _check_targets(
    targets: Sequence[tuple[str, Path | None]], table: Path, queries: Sequence[Path], folders: Sequence[Path]
) -> None:
    """Raises `OptionError` where an option's file is one that is read: the table, a query, an image of the table, a
    file of an engine; or the other option's.
    """
    from visionfast.artifacts import MANIFEST_NAME
    from visionfast.embed_journal import journal_path
    from visionfast.embedding_search import files_at

    read = [table, journal_path(Path(os.path.realpath(table))), *queries]
    seen: list[tuple[str, Path]] = []
    for option, target in targets:
        if target is None:
            continue
        place = Path(os.path.realpath(target))
        for other, path in seen:
            if path == place:
                raise OptionError(f"{option} {target}: is what {other} writes, too; name another file")
        seen.append((option, place))
        if not os.path.isfile(place):  # noqa: PTH113 (pathlib's raises for a long name)
            continue
        if any(same_file(place, path) for path in read):
            raise OptionError(f"{option} {target}: would overwrite what is read; name another file")
        if any((parent / MANIFEST_NAME).is_file() for parent in place.parents[:4]):  # cache/*/*/ too
            raise OptionError(f"{option} {target}: would overwrite a file of an engine; name another file")
        if files_at(table, place, folders):
            raise OptionError(f"{option} {target}: would overwrite an image of the table; name another file")


def _digests(paths: Sequence[Path], info: TableInfo) -> dict[Path, str | ImageError]:
    """The sha256 of each query's bytes."""
    from visionfast.preprocess.decode import read_image_file

    digests: dict[Path, str | ImageError] = {}
    for path in paths:
        try:
            digests[path] = hashlib.sha256(read_image_file(path, limits=info.limits)).hexdigest()
        except ImageError as error:
            digests[path] = error
    return digests


def _own(table: Path, folder: Path, paths: Sequence[Path], digests: Mapping[Path, str | ImageError]) -> list[set[int]]:
    """The rows that are a query itself."""
    from visionfast.embedding_search import rows_of

    root = os.path.realpath(folder)
    below = [os.path.relpath(os.path.realpath(path), root) for path in paths]
    return rows_of(table, [str(digests[path]) for path in paths], [shown_name(os.fsencode(path)) for path in below])


def _vectors(
    table: Path,
    info: TableInfo,
    digests: Mapping[Path, str | ImageError],
    engine: str | None,
    opening: dict[str, Any],
) -> dict[Path, npt.NDArray[np.float32] | ImageError]:
    """Each query's vector, (D,) f32: from the table where it has the image, else from the engine."""
    from visionfast.embedding_search import vectors_by_sha256
    from visionfast.predict_embeddings import embedded

    # An engine that is named is looked at even where no query takes one: it may be named in error.
    named = None if engine is None else _find_engine(engine, table, info)
    vectors: dict[Path, npt.NDArray[np.float32] | ImageError] = {}
    known = vectors_by_sha256(table, {digest for digest in digests.values() if isinstance(digest, str)})
    for path, digest in digests.items():
        if isinstance(digest, ImageError):
            vectors[path] = digest
        elif digest in known:
            vectors[path] = known[digest]
    if unknown := [path for path in digests if path not in vectors]:
        folder, manifest = named or _find_engine(None, table, info)
        with _open(folder, manifest, opening | {"limits": info.limits}) as embedder:
            for path, answer in embedded(embedder, unknown, patches=False):
                vectors[path] = answer if isinstance(answer, ImageError) else answer.cls
    return vectors


def _find_engine(named: str | None, table: Path, info: TableInfo) -> tuple[Path, EngineManifest]:
    """The engine that made the table.

    Raises:
        ArtifactError: it is not here.
        OptionError: the one that is named, or that has its name, is another.
    """
    from visionfast.artifacts import find_engine, read_manifest
    from visionfast.embed_table import engine_identity
    from visionfast.loading import runs_here

    try:
        folder = find_engine(
            named or info.engine_name, usable=runs_here, prefer=lambda one: engine_identity(one) == info.engine
        )
    except ArtifactError as error:
        if named is not None:
            raise
        raise ArtifactError(f"{table}: its engine is not at hand, --engine says where it is ({error})") from error
    manifest = read_manifest(folder, verify=True)
    if engine_identity(manifest) != info.engine:
        raise OptionError(
            f"{named or folder}: expected the engine that {table} was made with, {one_line(info.engine_name)}, got "
            "another; its vectors cannot be compared: embed the images again, or name the first one by --engine"
        )
    return folder, manifest


def _open(folder: Path, manifest: EngineManifest, options: dict[str, Any]) -> Embedder:
    from visionfast.embedder import Embedder

    return Embedder.from_folder(folder, manifest, **options)


def _stacked(
    vectors: dict[Path, npt.NDArray[np.float32] | ImageError], paths: Sequence[Path]
) -> npt.NDArray[np.float32]:
    import numpy as np

    return np.stack([vector for path in paths if not isinstance(vector := vectors[path], ImageError)])  # (Q, D)


def _sentence(path: Path, hits: Sequence[Hit]) -> str:
    lines = [f"{rank:>4}  {hit.similarity:7.4f}  {_shown(hit.file)}" for rank, hit in enumerate(hits, 1)]
    return "\n".join([f"{_shown(path)}:", *lines])


def _record(hit: Hit) -> dict[str, Any]:
    return {"file": hit.file, "similarity": round(hit.similarity, 6), "row": hit.row}


def _save(
    target: Path, answers: Sequence[tuple[Path, Sequence[Hit], npt.NDArray[np.float32] | ImageError]], images: Path
) -> None:
    """Each query with its hits, or with what is wrong with it, as a contact sheet."""
    import cv2

    from visionfast.artifacts import atomic_write
    from visionfast.contact_sheet import Row, Tile, contact_sheet

    rows = [
        Row(
            Tile(path, "query", _shown(path.name), answer if isinstance(answer, ImageError) else None),
            [
                Tile(_below(images, hit.file), f"{rank}   {hit.similarity:.3f}", _shown(hit.file))
                for rank, hit in enumerate(found, 1)
            ],
        )
        for path, found, answer in answers
    ]
    sheet = cv2.cvtColor(contact_sheet(rows), cv2.COLOR_RGB2BGR)
    quality = {".jpg": cv2.IMWRITE_JPEG_QUALITY, ".jpeg": cv2.IMWRITE_JPEG_QUALITY, ".webp": cv2.IMWRITE_WEBP_QUALITY}
    suffix = target.suffix.lower()
    done, encoded = False, None
    with contextlib.suppress(cv2.error):
        done, encoded = cv2.imencode(suffix, sheet, [quality[suffix], 92] if suffix in quality else [])
    if not done or encoded is None:
        raise ArtifactError(f"{target}: a sheet of {sheet.shape[1]}×{sheet.shape[0]} pixels fits no such file; .png")
    atomic_write(target, encoded.tobytes())
    pictures = {hit.file: _below(images, hit.file) for _, found, _ in answers for hit in found}
    missing = sum(path is None or not os.path.exists(path) for path in pictures.values())  # noqa: PTH110
    if missing:
        where = _shown(os.path.normpath(images))
        told = f"{missing} of {len(pictures)} pictures not found below {where}; --images says where they are"
        print(f"visionfast: {told}", file=sys.stderr)


def _embedded_folder(table: Path, info: TableInfo) -> Path:
    return table.resolve().parent / os.fsdecode(name_bytes(info.folder))


def _below(images: Path, file: str) -> Path | None:
    """Where a table's file is; `None` for one that would not be below the folder: a table may come from anywhere."""
    path = PurePath(os.fsdecode(name_bytes(file)))
    return None if path.is_absolute() or ".." in path.parts or "\0" in file else images / path


def _shown(text: object) -> str:
    """As one line; bytes of a name that are no text as `\\xff`."""
    return printable(os.fsencode(str(text)))
