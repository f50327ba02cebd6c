"""What a running server has on this machine besides its processes, and how it goes when they are gone.

A folder among the temporary ones holds links to the backends and the models. The folder is locked, and the server and
its processes inherit the lock: while one of them lives, however the others ended, it is not free. The names of the
server's shared memory begin with the folder's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from visionfast.errors import ServerError

__all__ = ["RUN_FOLDER_PREFIX", "RunFolder", "remove_leftovers"]

RUN_FOLDER_PREFIX = "visionfast-serve-"
_SHARED_MEMORY = Path("/dev/shm")


class RunFolder:
    """A new one. `lock` is a file descriptor that the server's process inherits.

    Raises:
        ServerError: the temporary folder cannot be written.
    """

    def __init__(self) -> None:
        while True:
            try:
                self.path = Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX))
                self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # taken for a leftover before it was locked
            except OSError as error:
                raise ServerError(f"{tempfile.gettempdir()}: cannot be written ({error.strerror})") from error
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self.lock)

    @property
    def shm_prefix(self) -> str:
        return f"{self.path.name}-"

    def remove(self, within_s: float) -> bool:
        """Takes it away, and its shared memory, as soon as no process has it; False if one still had it in the end."""
        os.close(self.lock)
        ends = time.monotonic() + within_s
        while not _remove_if_free(self.path):
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)
        return True


def remove_leftovers() -> list[Path]:
    """Takes away what servers of this user left that were killed; their folders' paths."""
    return [path for path in _of_this_user() if _remove_if_free(path)]


def _of_this_user() -> Iterator[Path]:
    for path in Path(tempfile.gettempdir()).glob(f"{RUN_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
                yield path


def _remove_if_free(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return not path.exists()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for region in _SHARED_MEMORY.glob(f"{path.name}-*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
