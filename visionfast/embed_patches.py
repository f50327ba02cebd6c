"""Dense features beside a table: an .npz for each image file, under the file's own path."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from visionfast.errors import ArtifactError, OptionError

__all__ = ["CANNOT_BE_WRITTEN", "PatchFolder"]

CANNOT_BE_WRITTEN = "its patches cannot be written"
"""How the error of a row begins whose image is well, and whose dense features have no place."""

_OF_THE_NAME = frozenset((errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EILSEQ))
"""What is wrong with one file's name, where others are written well."""

_PARTIAL = ".partial"
_TAKEN = re.compile(rb"(.*\.npz|\.partial)_*", re.DOTALL | re.IGNORECASE)
"""Folders that could stand where an image's features do, or where they are written."""


class PatchFolder:
    """`photos.parquet` has its in `photos.parquet.patches/`, `a/b.jpg`'s in `a/b.jpg.npz`: `cls` (D,) float32 and
    `patches` (h, w, D).

    No two images, and nothing else in there, have one name: a folder whose own name ends in `.npz`, or is `.partial`,
    has another underscore at its end.

    Args:
        output: the table.
        dtype: of `patches`. In float16 what is beyond ±65504 is brought to it.

    Raises:
        OptionError: something else is where the folder would be.
    """

    def __init__(self, output: Path, dtype: Literal["float32", "float16"]) -> None:
        self.path = output.with_name(f"{output.name}.patches")  # all of its name: photos.a and photos.b are two tables
        self._dtype = dtype
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise OptionError(f"{self.path}: expected a folder for the patches, got a file; name another output")

    def file(self, path: bytes) -> Path:
        """Where an image file's features are."""
        *folders, name = path.split(b"/")
        free = [folder + b"_" if _TAKEN.fullmatch(folder) else folder for folder in folders]
        return self.path / os.fsdecode(b"/".join([*free, name + b".npz"]))

    def has(self, path: bytes) -> bool:
        """Whether they are there; a file is there whole or not at all."""
        try:
            return self.file(path).is_file()
        except OSError:
            return False

    def refusal(self, path: bytes) -> str | None:
        """What `write` would say is wrong with the name, as far as can be seen; `None` where nothing is."""
        target = self.file(path)
        try:
            for part in target.relative_to(self.path).parts:
                with contextlib.suppress(FileNotFoundError):
                    (self.path / part).lstat()  # its length, wherever it is
            if stat.S_ISDIR(target.lstat().st_mode):
                return f"{CANNOT_BE_WRITTEN} ({os.strerror(errno.EISDIR)})"
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{CANNOT_BE_WRITTEN} ({error.strerror})"
        return None

    def write(self, path: bytes, cls: npt.NDArray[np.float32], patches: npt.NDArray[np.float32]) -> str | None:
        """Writes an image file's features, whole or not at all.

        Returns:
            what is wrong, where no file can have that name, else `None`.

        Raises:
            ArtifactError: the disk is full, or the folder cannot be written.
        """
        if self._dtype == "float16":
            patches = np.clip(patches, -65504, 65504)
        target = self.file(path)
        # One name for all: what a kill leaves is overwritten by the next. There is one writer at a time.
        partial = self.path / _PARTIAL
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be written ({error.strerror})") from error
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez(file, cls=cls, patches=patches.astype(self._dtype))
            partial.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if error.errno in _OF_THE_NAME:
                return f"{CANNOT_BE_WRITTEN} ({error.strerror})"
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise ArtifactError(f"{target}: cannot be written ({reason})") from error
        return None

    def drop(self, path: bytes) -> None:
        """Deletes the features of a file that is gone, and the folders that are empty then."""
        target = self.file(path)
        with contextlib.suppress(OSError):
            target.unlink()
            for parent in target.parents:
                if parent == self.path:
                    return
                parent.rmdir()
