"""What an embedding job has done so far, beside the table that it will be: an SQLite file, safe from kill -9.

`file` is the listing of this run; `answer` what was computed, by this run or one that was stopped. A path is the key
of both, so nothing is in them twice. The file is locked while the job runs: there is one a table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from visionfast.embed_patches import CANNOT_BE_WRITTEN
from visionfast.embed_table import Row
from visionfast.errors import ArtifactError, OptionError
from visionfast.image_files import ImageFile
from visionfast.terminal import one_line

__all__ = ["Journal", "job_settings", "journal_path"]

_APPLICATION_ID = 0x76666A31  # "vfj1": whose file it is, in SQLite's own header
_PAGE = 1024
"""Rows that are read at a time where others are written in between."""
_COMMIT_SECONDS = 1.0
"""What a kill may cost of the answers that were recorded."""

_TABLES = (
    "CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE file (path BLOB PRIMARY KEY, bytes INTEGER NOT NULL, modified_ns INTEGER NOT NULL, "
    "kept INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID",
    "CREATE TABLE answer (path BLOB PRIMARY KEY, bytes INTEGER NOT NULL, modified_ns INTEGER NOT NULL, sha256 TEXT, "
    "error TEXT, vector BLOB)",
)
_SOUND = (
    "typeof(path) = 'blob' AND typeof(bytes) = 'integer' AND typeof(modified_ns) = 'integer' "
    "AND typeof(sha256) IN ('text', 'null') AND (typeof(error) = 'text' AND vector IS NULL "
    "OR error IS NULL AND typeof(vector) = 'blob' AND length(vector) = ?)"
)
"""Of an answer, where somebody wrote in the file who does not know it: SQLite takes anything into any column."""


def journal_path(output: Path) -> Path:
    """Of the journal of a table."""
    return output.with_name(f"{output.name}.journal")


def job_settings(output: Path) -> str | None:
    """What the unfinished job of a table was started with; `None` where there is none, or none that can be read now."""
    path = journal_path(output)
    if not path.is_file():
        return None
    try:
        # Not read-only: after a kill, SQLite has to put the file in order before it can be read.
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=0)
        with contextlib.closing(connection):
            found = connection.execute("SELECT value FROM setting WHERE name = 'job'").fetchone()
    except sqlite3.Error:
        return None
    return str(found[0]) if found else None


class Journal:
    """A context manager; for one thread. A journal without an answer in it goes when it is closed.

    Args:
        output: the table; the journal is beside it.

    Raises:
        OptionError: another job has it.
        ArtifactError: it cannot be written, or the file there is none, or damaged.
    """

    def __init__(self, output: Path) -> None:
        self.path = journal_path(output)
        self._output = output
        if not os.access(output.parent, os.W_OK | os.X_OK):
            raise ArtifactError(f"{output}: cannot be written (its folder may not be written to)")
        before = self._identity()
        with self._failing():
            self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            with self._failing():
                self._open()
            # Whoever had the lock may have been done, and this file gone with its name, before it came to us.
            if before not in (None, self._identity()) or self._identity() is None:
                raise OptionError(f"{output}: another job has finished it this very moment; start again")
        except BaseException:
            self._connection.close()
            raise
        self._committed = time.monotonic()

    def _open(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("BEGIN EXCLUSIVE")
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = run("PRAGMA application_id").fetchone()
        if tables and application != _APPLICATION_ID:
            raise ArtifactError(
                f"{self.path}: expected a journal of `visionfast embed`, got something else; move it away"
            )
        if not tables:
            for table in _TABLES:
                run(table)
            run(f"PRAGMA application_id = {_APPLICATION_ID}")
        elif sorted(sql for (sql,) in run("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")) != sorted(_TABLES):
            raise self._damaged("its tables are others")
        run("COMMIT")
        run("PRAGMA cache_size = -32768")  # KiB: a million names in no order are put in order

    # ---- what the job is ----------------------------------------------------------------------------------

    @property
    def settings(self) -> str | None:
        """What the job was started with, where it has answers; `None` for a new one."""
        with self._failing():
            if self.answers == 0:
                return None
            found = self._connection.execute("SELECT value FROM setting WHERE name = 'job'").fetchone()
            return found[0] if found else ""

    def start(self, settings: str) -> None:
        with self._failing():
            self._connection.execute("INSERT OR REPLACE INTO setting VALUES ('job', ?)", (settings,))

    def check(self, dim: int) -> None:
        """Raises `ArtifactError` unless every answer has what a row needs, a vector of `dim` numbers or an error."""
        with self._failing():
            sql = f"SELECT path FROM answer WHERE NOT ({_SOUND}) LIMIT 1"
            if self._connection.execute(sql, (4 * dim,)).fetchone() is not None:
                raise self._damaged("an answer in it is none")

    @property
    def answers(self) -> int:
        with self._failing():
            return self._count("answer")

    def answered(self) -> Iterator[ImageFile]:
        """The files of an earlier run's answers that may be kept, in order, as they were then. The listing, and what is
        kept, may be written meanwhile.
        """
        sql = "SELECT path, bytes, modified_ns, error FROM answer WHERE path > ? AND sha256 IS NOT NULL"
        for *file, error in self._paged(sql):
            if not (error or "").startswith(CANNOT_BE_WRITTEN):
                yield ImageFile(*file)

    # ---- what there is to do ------------------------------------------------------------------------------

    def list(self, files: Iterable[ImageFile]) -> int:
        """Puts a new listing in the place of the last one; how many files that is. Of a path the first counts."""
        with self._failing(), self._transaction():
            self._connection.execute("DELETE FROM file")
            self._connection.executemany(
                "INSERT OR IGNORE INTO file (path, bytes, modified_ns) VALUES (?, ?, ?)", files
            )
            return self._count("file")

    def keep(self, rows: Iterable[Row]) -> tuple[int, int, int]:
        """Marks the files that are in the table already, and have not changed since.

        Returns:
            how many rows there are, how many of them are of files that still are there, and how many files are kept.
        """
        count = known = 0
        rows = iter(rows)
        with self._failing(), self._transaction():
            while some := [(row.n_bytes, row.modified_ns, row.path) for row in itertools.islice(rows, _PAGE)]:
                count += len(some)
                sql = "UPDATE file SET kept = (bytes = ? AND modified_ns = ?) WHERE path = ?"
                known += self._connection.executemany(sql, some).rowcount
            return count, known, self._count("file WHERE kept")

    def revise(self, whole: Callable[[bytes], bool]) -> None:
        """Forgets the answers of an earlier run that are not, or no longer, what the listing asks for.

        Those are the ones of files that changed or are gone; that could not be read, or whose patches could not be
        written, for they may be by now; that the table has already, where the run was killed after it was written; and
        those with `not whole(path)`.
        """
        with self._failing(), self._transaction():
            run = self._connection.execute
            run(
                "DELETE FROM answer WHERE sha256 IS NULL OR instr(error, ?) = 1 OR NOT EXISTS "
                "(SELECT 1 FROM file WHERE file.path = answer.path AND "
                "file.bytes = answer.bytes AND file.modified_ns = answer.modified_ns AND NOT file.kept)",
                (CANNOT_BE_WRITTEN,),
            )
            for (path,) in self._paged("SELECT path FROM answer WHERE path > ? AND error IS NULL"):
                if not whole(path):
                    run("DELETE FROM answer WHERE path = ?", (path,))

    def gone(self) -> Iterator[bytes]:
        """The paths that have an answer and are not in the listing, in order."""
        sql = "SELECT path FROM answer WHERE path > ? AND NOT EXISTS (SELECT 1 FROM file WHERE file.path = answer.path)"
        return (path for (path,) in self._paged(sql))

    def pending(self) -> Iterator[ImageFile]:
        """The files that have neither an answer nor a row, in order. Answers may be recorded meanwhile."""
        sql = (
            "SELECT path, bytes, modified_ns FROM file WHERE path > ? AND NOT kept "
            "AND NOT EXISTS (SELECT 1 FROM answer WHERE answer.path = file.path)"
        )
        return (ImageFile(*row) for row in self._paged(sql))

    # ---- what was done ------------------------------------------------------------------------------------

    def record(self, row: Row) -> None:
        """One file's answer; safe within a second."""
        vector = None if row.vector is None else row.vector.astype("<f4").tobytes()
        answer = (row.path, row.n_bytes, row.modified_ns, row.sha256, row.error, vector)
        with self._failing():
            if not self._connection.in_transaction:
                self._connection.execute("BEGIN")
            self._connection.execute("INSERT INTO answer VALUES (?, ?, ?, ?, ?, ?)", answer)
        if time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        with self._failing():
            if self._connection.in_transaction:
                self._connection.execute("COMMIT")
        self._committed = time.monotonic()

    def rows(self) -> Iterator[Row | bytes]:
        """Every file of the listing, in order: its answer, or the path of one whose row the table has."""
        sql = (
            "SELECT file.path, answer.path IS NULL, answer.bytes, answer.modified_ns, sha256, error, vector "
            "FROM file LEFT JOIN answer ON answer.path = file.path ORDER BY file.path"
        )
        with self._failing():
            for path, kept, n_bytes, modified_ns, sha256, error, vector in self._connection.execute(sql):
                if kept:
                    yield path
                    continue
                dense = None if vector is None else np.frombuffer(vector, "<f4")
                yield Row(path, n_bytes, modified_ns, sha256, error, dense)

    # ---- its end ------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Deletes the file; the lock is held until its name is gone."""
        with self._failing():
            self._connection.rollback()
            # SQLite's own first: left beside a new file of this name, it would be taken for that one's.
            for path in (self.path.with_name(f"{self.path.name}-journal"), self.path):
                path.unlink(missing_ok=True)
        self._connection.close()

    def close(self) -> None:
        """What was recorded stays, for the next run."""
        with contextlib.suppress(sqlite3.ProgrammingError):  # it is closed
            try:
                self.commit()
                if self.answers == 0:
                    self.remove()
            finally:
                self._connection.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(ArtifactError):  # the first error is the one to tell
                self.close()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _count(self, what: str) -> int:
        (count,) = self._connection.execute(f"SELECT count(*) FROM {what}").fetchone()
        return int(count)

    def _paged(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """`sql` has one place, for the path after which to go on; that path is its first column."""
        last = b""
        while True:
            with self._failing():
                page = self._connection.execute(f"{sql} ORDER BY path LIMIT {_PAGE}", (last,)).fetchall()
            if not page:
                return
            yield from page
            last = page[-1][0]

    def _damaged(self, reason: str) -> ArtifactError:
        return ArtifactError(
            f"{self.path}: damaged, or of another version ({one_line(reason)}); delete it to begin again, without what "
            "is in it"
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self.commit()
        self._connection.execute("BEGIN")
        try:
            yield
        except BaseException:
            # A full disk has ended it already.
            self._connection.rollback()
            raise
        self._connection.execute("COMMIT")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.Error as error:
            reason = str(error)
            if "locked" in reason:
                raise OptionError(
                    f"{self._output}: another job is writing it; wait for that one, or name another output"
                ) from error
            if any(words in reason for words in ("malformed", "no such", "decode")):
                raise self._damaged(reason) from error
            if "not a database" in reason:
                raise ArtifactError(
                    f"{self.path}: expected a journal of `visionfast embed`, got something else ({reason}); "
                    "move it away"
                ) from error
            if "unable to open" in reason:
                raise ArtifactError(
                    f"{self.path}: cannot be opened; it should be a file that may be written"
                ) from error
            reason = "the disk is full" if "full" in reason else reason
            raise ArtifactError(
                f"{self.path}: cannot be written ({reason}); what is in it is kept, and the same command goes on"
            ) from error
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be written ({error.strerror or error})") from error
