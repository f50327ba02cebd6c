"""What glibc's allocator is told in the server and in its stages: what each keeps for the next image.

By itself it keeps what large images took, in an arena for every thread (3,000 PNGs of 4000×3000 had a stage at 1.1 GB).
The server only passes images on, from some two hundred threads: one arena, and whatever is larger than a few pages
goes back to the system as soon as it is free. A stage computes with images, and new memory costs it more than the
system calls: every page is cleared first. So it keeps up to 64 MiB, and what is up to 8 MiB large.

Whoever sets glibc's own `MALLOC_…` variables for `serve` has the word, for both.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping

__all__ = ["for_server", "for_stage"]

_SERVER = {"ARENA_MAX": 1, "MMAP_THRESHOLD_": 128 << 10, "TRIM_THRESHOLD_": 2 << 20}
_STAGE = {"ARENA_MAX": 2, "MMAP_THRESHOLD_": 8 << 20, "TRIM_THRESHOLD_": 64 << 20}
_MALLOPT = {"ARENA_MAX": -8, "MMAP_THRESHOLD_": -3, "TRIM_THRESHOLD_": -1}
"""glibc's malloc.h: M_ARENA_MAX and its like."""
_OURS = "VISIONFAST_STAGE_MALLOC"
"""Names of those that a stage takes its own value for, with commas between. A stage inherits the server's variables."""


def for_server(variables: MutableMapping[str, str]) -> None:
    """Adds to the server's environment what nobody has set."""
    ours = [name for name in _SERVER if f"MALLOC_{name}" not in variables]
    variables.update({f"MALLOC_{name}": str(_SERVER[name]) for name in ours})
    variables[_OURS] = ",".join(ours)


def for_stage(variables: Mapping[str, str] = os.environ) -> None:
    """Has this process keep what a stage should. Nothing happens where the server was not started by `for_server`."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for name in filter(None, variables.get(_OURS, "").split(",")):
            libc.mallopt(_MALLOPT[name], _STAGE[name])
