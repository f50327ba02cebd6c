"""Encoded images on disk: one file each, bounded in bytes, shared by the processes of one user.

A file is written beside its place and renamed into it, and believed only where its own sha256 agrees: whatever is
damaged, cut short or foreign is no entry, and is removed. Whoever writes holds `lock`, in which stands how many bytes
the folder has at most. Readers take no lock; a file that vanishes under them is a miss.

    folder/lock         held by the writer of the moment; 20 digits: bytes in the folder, at most
    folder/partial-…    being written, or left by a process that was killed
    folder/5f/5f3a…     an entry, under its key (`visionfast.embedding_file`)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from visionfast import embedding_file
from visionfast.embedding import Embedding, check_key
from visionfast.errors import ArtifactError, OptionError

__all__ = ["EmbeddingStore", "StoreStats"]

_LOCK_PATIENCE_S = 2.0
_HEADROOM = 16
"""A full folder is emptied by one part in so many beyond what is needed: else every write would walk all of it."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What lies in the folder, and what one `EmbeddingStore` did since it was made.

    Attributes:
        entries, bytes: in the folder now, whoever wrote them.
        max_bytes: that it may hold.
        written: entries that were saved.
        not_kept: entries that could not be: the disk is full, the folder may not be written, another process held
            its lock for too long, the entry is larger than the bound, or it is not made of host arrays.
        evictions: entries that were removed to make room.
        damaged: files under an entry's name that were none, and were removed.
    """

    entries: int
    bytes: int
    max_bytes: int
    written: int
    not_kept: int
    evictions: int
    damaged: int


class EmbeddingStore:
    """The folder. Safe for threads and for several processes; never raises for what the disk does.

    Args:
        folder: made when the first entry is saved. Its files are for their owner's eyes only: features say much
            about the image.
        max_bytes: that the entries have together at most, the one that is being written among them. Those that were
            neither written nor loaded for longest go first. Processes that share a folder give it one bound.

    Raises:
        OptionError: `max_bytes` is negative.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        if max_bytes < 0:
            raise OptionError(f"max_folder_bytes: expected at least 0, got {max_bytes}")
        self.folder = Path(folder)
        if not os.fspath(folder) or (self.folder.exists() and not self.folder.is_dir()):
            raise OptionError(f"{os.fspath(folder)!r}: expected a folder for encoded images")
        self.max_bytes = max_bytes
        self._writer = threading.Lock()
        self._walked = False
        self._counting = threading.Lock()
        self._counts = {"written": 0, "not_kept": 0, "evictions": 0, "damaged": 0}

    def load(self, key: str) -> Embedding | None:
        """The entry, with arrays of its own, and marked as used; `None` where there is none.

        Raises:
            OptionError: `key` is not 64 hex digits.
        """
        path = self._path(key)
        try:
            return embedding_file.read(path, key)
        except ArtifactError:
            with contextlib.suppress(OSError):
                path.unlink()
                self._count("damaged")
        except OSError:
            pass
        return None

    def save(self, key: str, embedding: Embedding) -> bool:
        """Writes the entry, after as many others have gone as it needs. Gives whether it was kept.

        Raises:
            OptionError: `key` is not 64 hex digits.
        """
        path = self._path(key)
        parts = embedding_file.pack(key, embedding)
        kept = False
        if parts is not None:
            with contextlib.suppress(OSError):
                kept = self._save(path, parts)
        self._count("written" if kept else "not_kept")
        return kept

    def clear(self) -> None:
        """Removes all entries, whoever wrote them, as far as they may be removed."""
        with contextlib.suppress(OSError), self._writing() as lock:
            _record(lock, self._shrink(0))

    def stats(self) -> StoreStats:
        """Walks the folder."""
        sizes = [entry.size for entry in self._entries()]
        with self._counting:
            return StoreStats(entries=len(sizes), bytes=sum(sizes), max_bytes=self.max_bytes, **self._counts)

    # ---- writing --------------------------------------------------------------------------------------------

    def _save(self, path: Path, parts: list[bytes | memoryview]) -> bool:
        size = sum(len(part) for part in parts)
        if size > self.max_bytes:
            return False
        with self._writing() as lock:
            # Walked once at least: the folder may have been filled by something that does not keep the count.
            total = _recorded(lock) if self._walked else None
            if total is None or total + size > self.max_bytes:
                total = self._shrink(self.max_bytes - size)
                self._walked = True
            if total + size > self.max_bytes:
                return False  # there is what may not be removed
            # Before the bytes are there: if this process is killed now, the folder has less than it says, never more.
            _record(lock, total + size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=self.folder, prefix="partial-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.writelines(parts)
                Path(partial).replace(path)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
        return True

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        """The only writer among all threads and processes: gives the open lock file.

        Raises:
            OSError: the folder cannot be written, or another process held the lock for too long: one that was
                stopped must not stop this one.
        """
        with self._writer:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _acquire(lock)
                yield lock
            finally:
                # By name: closing is not enough while a process that was forked meanwhile has a copy of it.
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    def _shrink(self, goal: int) -> int:
        """Removes leftovers, and where there are more than `goal` bytes the least recently used entries.

        Returns:
            The bytes that are left.
        """
        for partial in self.folder.glob("partial-*"):  # whoever wrote them had the lock, and has it no more
            with contextlib.suppress(OSError):
                partial.unlink()
        entries = sorted(self._entries())
        total = sum(entry.size for entry in entries)
        if total > goal:
            goal = max(goal - self.max_bytes // _HEADROOM, 0)
        for entry in entries:
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                entry.path.unlink()
                total -= entry.size
                self._count("evictions")
        return total

    # ---- the folder -----------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.folder / key[:2] / key

    def _entries(self) -> Iterator[_Entry]:
        """Every file with an entry's name. What else lies there is not ours to count or to remove."""
        for shelf in _scan(self.folder):
            if re.fullmatch("[0-9a-f]{2}", shelf.name) and shelf.is_dir(follow_symlinks=False):
                for entry in _scan(shelf.path):
                    if re.fullmatch(f"{shelf.name}[0-9a-f]{{62}}", entry.name):
                        with contextlib.suppress(OSError):  # another process removed it
                            status = entry.stat(follow_symlinks=False)
                            yield _Entry(status.st_mtime_ns, Path(entry.path), status.st_size)

    def _count(self, what: str) -> None:
        with self._counting:
            self._counts[what] += 1


class _Entry(NamedTuple):
    """Sorts by when it was last used."""

    mtime_ns: int
    path: Path
    size: int


def _scan(folder: str | Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _acquire(lock: int) -> None:
    until = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.002)


def _recorded(lock: int) -> int | None:
    text = os.pread(lock, 21, 0)
    return int(text) if len(text) == 20 and text.isdigit() else None


def _record(lock: int, total: int) -> None:
    os.ftruncate(lock, os.pwrite(lock, b"%020d" % total, 0))
