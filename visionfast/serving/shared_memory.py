"""The POSIX shared memory of a client, in regions that are used again and again, and what is left of a dead one's.

A region's file is in /dev/shm for the milliseconds until the server has mapped it; so nothing is left there, however
its client ends. What a dead client's regions still hold is the server's memory: their names say whose they are, and an
abstract socket, which Linux takes away with its process, says whether that client lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Region", "Regions", "abandoned", "remove_abandoned_files"]

_FOLDER = Path("/dev/shm")
_PREFIX = "visionfast-client-"
_LEAST_BYTES = 1 << 20
_MOST_BYTES = 256 << 20
"""Of all regions of a client; what does not fit is sent in its message."""
_NEW_S = 1.0
"""A file may not be locked yet."""
_PATIENCE_S = 0.5
"""Between two times that the server is asked to forget the same region."""


class Region:
    """A piece of shared memory that one request at a time uses.

    Attributes:
        name: that the server knows it by; nobody can guess it.
        key: of its file, until the server has mapped it.
        size: bytes.
        registered: whether the server may know it.
    """

    def __init__(self, owner: str, size: int) -> None:
        self.name = f"{_PREFIX}{owner}-{secrets.token_hex(16)}"
        self.key = f"/{_PREFIX}{owner}-{secrets.token_hex(16)}"
        self.size = size
        self.registered = False
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._file = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # says, as long as the file has a name, that somebody is at it
            # All of it now: memory that is found missing at a write would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size)
        except BaseException:
            self.unlink()
            raise
        self._bytes = np.frombuffer(self._memory, np.uint8)

    @property
    def _path(self) -> Path:
        return _FOLDER / self.key[1:]

    def fill(self, array: npt.NDArray[Any]) -> None:
        """The array's bytes to the region's beginning."""
        self._bytes[: array.nbytes] = array.reshape(-1).view(np.uint8)

    def unlink(self) -> None:
        """Its name goes; who has mapped it keeps it."""
        self._path.unlink(missing_ok=True)
        self._file()


class Regions:
    """The regions of one client, for several threads.

    Args:
        most_bytes: of all regions together.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._owner = secrets.token_hex(8)
        self._alive = socket.socket(socket.AF_UNIX)
        self._alive.bind(_life_sign(self._owner))
        self._dies = weakref.finalize(self, self._alive.close)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._all: set[Region] = set()
        self._free: list[Region] = []
        self._left: list[Region] = []  # the server is yet to forget them
        self._again = 0.0  # when it is asked

    def take(self, nbytes: int) -> Region | None:
        """The smallest free region of so many bytes, or a new one; None: there is no room for it."""
        with self._lock:
            if fitting := [region for region in self._free if region.size >= nbytes]:
                region = min(fitting, key=lambda region: region.size)
                self._free.remove(region)
                return region
            size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
            while self._size() + size > self._most_bytes:
                if not self._free:
                    return None
                self._leave(self._free[0])  # smaller than what is wanted
            try:
                region = Region(self._owner, size)
            except OSError:
                return None  # /dev/shm is full, or there is none
            self._all.add(region)
            return region

    def give_back(self, region: Region) -> None:
        """The server has answered."""
        with self._lock:
            if region in self._all and region not in self._left:
                self._free.append(region)

    def leave(self, region: Region) -> None:
        """The server may still read it, or doesn't know it: it is never filled again."""
        with self._lock:
            self._leave(region)

    def leave_free(self) -> None:
        """All that no request uses."""
        with self._lock:
            for region in list(self._free):
                self._leave(region)

    def _leave(self, region: Region) -> None:
        region.unlink()
        if region in self._free:
            self._free.remove(region)
        if not region.registered:
            self._all.discard(region)
        elif region not in self._left:
            self._left.append(region)

    def take_left(self) -> list[Region]:
        """Those that the server is to forget now: `forgotten` says what it said."""
        with self._lock:
            if not self._left or time.monotonic() < self._again:
                return []
            self._again = time.monotonic() + _PATIENCE_S
            left, self._left = self._left, []
            return left

    def forgotten(self, region: Region, gone: bool) -> None:
        """Whether the server has forgotten it; if not, its turn comes again."""
        with self._lock:
            if gone:
                self._all.discard(region)
            elif region in self._all:
                self._left.append(region)

    def registered(self) -> list[Region]:
        """All that the server may know."""
        with self._lock:
            return [region for region in self._all if region.registered]

    def _size(self) -> int:
        return sum(region.size for region in self._all)

    def close(self) -> None:
        """What the server has not forgotten by now is another's to have forgotten, when it is in use no more."""
        with self._lock:
            for region in self._all:
                region.unlink()
            self._free.clear()
            self._left.clear()
            self._all.clear()
            self._dies()


# ---- clients that are dead ----------------------------------------------------------------------------------------


def _life_sign(owner: str) -> str:
    return f"\0{_PREFIX}{owner}"


def abandoned(names: Iterable[str]) -> list[str]:
    """Those of a server's regions whose client is dead."""
    found: list[str] = []
    lives: dict[str, bool] = {}
    for name in names:
        if name.startswith(_PREFIX):
            owner = name.removeprefix(_PREFIX).rpartition("-")[0]
            if owner not in lives:
                lives[owner] = _lives(owner)
            if not lives[owner]:
                found.append(name)
    return found


def _lives(owner: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sign:
        try:
            sign.bind(_life_sign(owner))
        except (OSError, ValueError):
            return True
    return False


def remove_abandoned_files() -> None:
    """Takes away what clients of this user that were killed before the server had mapped it left in /dev/shm."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, or somebody else was faster
            told = path.lstat()
            if told.st_uid != os.getuid() or time.time() - told.st_mtime < _NEW_S:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
