"""One run of an embedding job: what there is, what is missing, and the table that it becomes.

The folder is listed into the journal. Of its files those are kept that the table of an earlier run has, or the journal
of one that was stopped; the others are embedded, and each answer goes into the journal as it comes. In the end the
table is written from the old one and the journal, in the order of the paths. Nothing that grows with the number of
files is in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from visionfast.embed_journal import Journal
from visionfast.embed_patches import CANNOT_BE_WRITTEN, PatchFolder
from visionfast.embed_table import Row, TableInfo, read_rows, write_table
from visionfast.embedder import Embedder
from visionfast.errors import ArtifactError, ImageError
from visionfast.image_files import ImageFile, image_files, printable
from visionfast.preprocess.decode import read_image_file
from visionfast.results import Embeddings
from visionfast.sessions.embeddings import Embedded

__all__ = ["EmbedReport", "Progress", "Run"]

Progress: TypeAlias = Callable[[str, int, "int | None"], None]
"""Told the stage (`listing`, `embedding`, `writing`), how many files of it are done, and of how many."""

_SHOWN = 20
"""Bad files, and folders that could not be read, that a report names."""
_BATCH_SECONDS = 0.1
"""Where a batch takes longer on the average, its answers are on the disk at once; else within a second."""
_TOLD_EVERY = 1000
"""Files, where each is a matter of microseconds."""

_Thing = TypeVar("_Thing")


@dataclass(frozen=True, slots=True)
class EmbedReport:
    """What came of a job.

    Attributes:
        output: the table.
        files: its rows.
        embedded: vectors that this run computed.
        kept: rows that were there already: in the table, or in the journal of a run that was stopped.
        removed: rows of files that are gone; none is below a folder that could not be read.
        bad: rows with an error, those that are kept among them.
        bad_files: the first 20 of these, path and error, each one line.
        unread: folders that could not be read; rows that were there of what is in them are left as they are.
        unread_folders: the first 20 of these, path and error, each one line.
        written: whether the table was written; `False` where there was nothing new.
        embedding_ns: that embedding took.
    """

    output: Path
    files: int
    embedded: int
    kept: int
    removed: int
    bad: int
    bad_files: tuple[tuple[str, str], ...]
    unread: int
    unread_folders: tuple[tuple[str, str], ...]
    written: bool
    embedding_ns: int


@dataclass(slots=True)
class _Item:
    """A file on its way through the decoding threads, which note what they read."""

    file: ImageFile
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Called once.

    Attributes:
        embedder, progress: as for `visionfast.embed_job.embed_folder`.
        root: the folder of the images.
        table: to be written, in a folder that is there.
        before: what the table says of itself that is there already, one that may be added to; `None` where there is
            none.
        info: what the new one will say.
        dense: where dense features go, if they are wanted.
        journal: open, and of the same job.
        unread: folders that could not be read, and why.
    """

    embedder: Embedder
    root: Path
    table: Path
    before: TableInfo | None
    info: TableInfo
    dense: PatchFolder | None
    journal: Journal
    progress: Progress
    unread: list[tuple[bytes, str]] = field(default_factory=list, init=False)

    def __call__(self) -> EmbedReport:
        self.journal.check(self.info.dim)
        files = self.journal.list(self._watched(self._listed(), "listing", None))
        bad = _Bad()
        rows, known, kept = self.journal.keep(bad.noted(self._to_keep()))
        for path in self.journal.gone():
            self._drop(path)
        self.journal.revise(self._whole)
        self.journal.start(self.info.to_json())
        done = kept + self.journal.answers
        started = time.perf_counter_ns()
        embedded = self._embed(done, files) if done < files else 0
        embedding_ns = time.perf_counter_ns() - started
        nothing_new = rows == kept == files and self.before is not None and self.before.folder == self.info.folder
        if not nothing_new:
            bad = _Bad()
            write_table(self.table, self.info, bad.noted(self._watched(self._rows(), "writing", files)))
        self.journal.remove()
        return EmbedReport(
            output=self.table,
            files=files,
            embedded=embedded,
            kept=done,
            removed=rows - known,
            bad=bad.count,
            bad_files=tuple(bad.first),
            unread=len(self.unread),
            unread_folders=tuple((printable(path), reason) for path, reason in self.unread[:_SHOWN]),
            written=not nothing_new,
            embedding_ns=embedding_ns,
        )

    # ---- what there is ------------------------------------------------------------------------------------

    def _listed(self) -> Iterator[ImageFile]:
        """The files there are; of a folder that cannot be read those that the journal has, or the table, for nobody
        said they are gone.

        A disk that is away for a moment must not cost what took hours.
        """
        yield from image_files(self.root, unread=lambda *told: self.unread.append(told))
        if self.unread:
            below = tuple(path + b"/" for path, _ in self.unread)
            # The journal first, of a path the first counts: what it has is the newer one.
            rows = (ImageFile(row.path, row.n_bytes, row.modified_ns) for row in self._old(vectors=False))
            for file in itertools.chain(self.journal.answered(), rows):
                if file.path.startswith(below):
                    yield file

    def _to_keep(self) -> Iterator[Row]:
        """The table's rows; one that has to be made again comes with a size that no file has."""
        for row in self._old(vectors=False):
            if row.error is None:
                fits = self._whole(row.path)
            elif self.dense is not None and row.error.startswith(CANNOT_BE_WRITTEN):
                fits = self.dense.refusal(row.path) == row.error
            else:
                fits = row.sha256 is not None or self._unreadable(row.path) == row.error
            yield row if fits else dataclasses.replace(row, n_bytes=-1)

    def _old(self, *, vectors: bool) -> Iterator[Row]:
        return iter(()) if self.before is None else read_rows(self.table, vectors=vectors)

    def _whole(self, path: bytes) -> bool:
        return self.dense is None or self.dense.has(path)

    def _unreadable(self, path: bytes) -> str | None:
        try:
            self._load(_Item(ImageFile(path, 0, 0)))
        except ImageError as error:
            return _reason(error)
        return None

    # ---- what is missing ----------------------------------------------------------------------------------

    def _load(self, item: _Item) -> bytes:
        """A file's bytes, on a decoding thread. What is noted of it is from before they were read: of a file that is
        being written that is out of date, so that the next run looks at it again.
        """
        path = self.root / os.fsdecode(item.file.path)
        with contextlib.suppress(OSError):
            item.file = ImageFile.of(item.file.path, path.stat())
        data = read_image_file(path, limits=self.info.limits)
        item.sha256 = hashlib.sha256(data).hexdigest()
        return data

    def _embed(self, done: int, files: int) -> int:
        """Every file that is pending; how many of them have a vector now."""
        embedded = computed = 0
        batch, started = self.embedder.session.batch, time.monotonic()
        self.progress("embedding", done, files)
        items = map(_Item, self.journal.pending())
        with contextlib.closing(self.embedder.stream(items, load=self._load, patches=self.dense is not None)) as stream:
            for count, (item, answer) in enumerate(stream, done + 1):
                row = self._row(item, answer)
                self.journal.record(row)
                embedded += row.error is None
                if isinstance(answer, Embedded):
                    computed += 1
                    # A batch's answers come together; the next ones take as long as the engine does.
                    if computed % batch == 0 and time.monotonic() - started > _BATCH_SECONDS * computed / batch:
                        self.journal.commit()
                self.progress("embedding", count, files)
        self.journal.commit()
        return embedded

    def _row(self, item: _Item, answer: Embedded | ImageError) -> Row:
        """A file's answer. Its dense features are on the disk before it counts."""
        vector = None
        if isinstance(answer, ImageError):
            error: str | None = _reason(answer)
        elif not _finite(answer):
            error = "the engine gave values that are no numbers"
        else:
            found = _one(answer).normalised() if self.info.normalised else _one(answer)
            vector, error = found.cls[0], None
            if self.dense is not None and found.patches is not None:
                error = self.dense.write(item.file.path, vector, found.patches[0])
        if error is not None:
            vector = None
            if self.dense is not None:
                self.dense.drop(item.file.path)
        return Row(*item.file, item.sha256, error, vector)

    # ---- the table ----------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Row]:
        """Every file's row, in order: the journal's, and between them those of the old table that are kept."""
        there = self._old(vectors=True)
        old = next(there, None)
        for wanted in self.journal.rows():
            path = wanted.path if isinstance(wanted, Row) else wanted
            while old is not None and old.path < path:
                self._drop(old.path)
                old = next(there, None)
            found = None
            if old is not None and old.path == path:
                found, old = old, next(there, None)
            if isinstance(wanted, Row):
                yield wanted
            elif found is not None:
                yield found
            else:
                raise ArtifactError(f"{self.table}: it was changed while the job ran; start again")
        while old is not None:
            self._drop(old.path)
            old = next(there, None)

    def _drop(self, path: bytes) -> None:
        """The file is gone."""
        if self.dense is not None:
            self.dense.drop(path)

    def _watched(self, things: Iterable[_Thing], stage: str, total: int | None) -> Iterator[_Thing]:
        done = 0
        for done, thing in enumerate(things, 1):
            yield thing
            if done % _TOLD_EVERY == 0:
                self.progress(stage, done, total)
        self.progress(stage, done, total)


class _Bad:
    """The rows with an error among those that pass."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[tuple[str, str]] = []

    def noted(self, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            if row.error is not None:
                self.count += 1
                if self.count <= _SHOWN:
                    self.first.append((printable(row.path), row.error))
            yield row


def _one(answer: Embedded) -> Embeddings:
    patches = None if answer.patches is None else answer.patches[None]
    return Embeddings(answer.cls[None], patches, (answer.placed,))


def _finite(answer: Embedded) -> bool:
    return bool(np.isfinite(answer.cls).all() and (answer.patches is None or np.isfinite(answer.patches).all()))


def _reason(error: ImageError) -> str:
    """As a table can hold it: one line, and text."""
    return printable(error.reason.encode("utf-8", "surrogateescape"))
