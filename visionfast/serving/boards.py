"""Where the steps of an ensemble write how long their lines are, so that the first one refuses what they would.

Otherwise an image is decoded and only then refused, at the engine, and under load most of the decoding is for nothing.
A file for each process in the folder that `visionfast serve` starts the server in, mapped into memory. A server that is
started otherwise has no such folder, and its steps each refuse for themselves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from visionfast.serving.run_folder import RUN_FOLDER_PREFIX
from visionfast.serving.waiting import LEVELS

__all__ = ["Boards"]


class Boards:
    """Those of one pipeline, as one of its steps sees them; times are `time.monotonic_ns`.

    Args:
        pipeline: its name.
        model: the step's.
        folder: where they are.
    """

    def __init__(self, pipeline: str, model: str, folder: Path) -> None:
        self._folder = folder if folder.name.startswith(RUN_FOLDER_PREFIX) else None
        self._pipeline, self._name = pipeline, f"{pipeline}@{model}@{os.getpid()}.line"
        self._own: npt.NDArray[np.int64] | None = None
        self._behind: dict[str, list[npt.NDArray[np.int64]]] = {}

    def open(self) -> None:
        """This process writes on one."""
        if self._folder is not None:
            self._own = np.memmap(self._folder / self._name, np.int64, "w+", shape=(len(LEVELS),))

    def write(self, now_ns: int, waits_ns: Sequence[int]) -> None:
        """How long an image of each level will take that comes now; 0: nothing is ahead of it."""
        if self._own is not None:
            self._own[:] = [wait_ns and now_ns + wait_ns for wait_ns in waits_ns]

    def wait_ns(self, level: int, now_ns: int) -> int:
        """How long an image will wait that comes now, at all steps; of each at the process that is free first."""
        if self._folder is not None and not self._behind:
            for path in self._folder.glob(f"{self._pipeline}@*.line"):
                board = np.memmap(path, np.int64, "r", shape=(len(LEVELS),))
                self._behind.setdefault(path.name.split("@")[1], []).append(board)
        return sum(max(0, min(int(board[level]) for board in boards) - now_ns) for boards in self._behind.values())
