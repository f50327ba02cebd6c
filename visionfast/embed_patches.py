"""Dense features beside a table: an .npz for each image file, under the file's own path."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from visionfast.errors import ArtifactError, OptionError

__all__ = ["PatchFolder"]

_OF_THE_NAME = frozenset((errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EILSEQ))
"""What is wrong with one file's name, where others are written well."""


class PatchFolder:
    """`photos.parquet` has its in `photos.patches/`, `a/b.jpg`'s in `a/b.jpg.npz`: `cls` (D,) float32 and `patches`
    (h, w, D).

    Args:
        output: the table.
        dtype: of `patches`. In float16 what is beyond ±65504 is brought to it.

    Raises:
        OptionError: the folder would stand where the table does.
    """

    def __init__(self, output: Path, dtype: Literal["float32", "float16"]) -> None:
        self.path = output.with_suffix(".patches")
        self._dtype = dtype
        if self.path == output:
            raise OptionError(f"{output}: the dense features would take its place; name it {output.stem}.parquet")

    def file(self, path: bytes) -> Path:
        """Where an image file's features are."""
        return self.path / f"{os.fsdecode(path)}.npz"

    def has(self, path: bytes) -> bool:
        """Whether they are there; a file is there whole or not at all."""
        try:
            return self.file(path).is_file()
        except OSError:
            return False

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
        partial = self.path / ".partial"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez(file, cls=cls, patches=patches.astype(self._dtype))
            partial.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if error.errno in _OF_THE_NAME:
                return f"its patches cannot be written ({error.strerror})"
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
