"""Options that are whole numbers, held to their range."""

from __future__ import annotations

import operator

from visionfast import machine
from visionfast.errors import OptionError

__all__ = ["MAX_BATCH", "MAX_THREADS", "checked_threads", "checked_whole"]

MAX_BATCH = 1024
"""Images that a graph takes a call. More of them are not quicker, and take memory by the gigabyte."""

MAX_THREADS = 1024
"""More processors than most machines have. Runtimes keep their threads in 32 bits, and start as many as are asked."""


def checked_whole(name: str, value: object, most: int, because: str = "") -> int:
    """An option's value, from 1 to `most`; whatever is a whole number in Python is taken (NumPy's too), but no bool.

    Args:
        name: of the option.
        value: what was given.
        most: that it may be.
        because: where `most` comes from, in a few words; empty where that is of no use to anybody.

    Raises:
        OptionError: it is none, or out of that range.
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        limit = f"{most} ({because})" if because else f"{most}"
        raise OptionError(f"{name}: expected a whole number from 1 to {limit}, got {value!r}")
    return number


def checked_threads(threads: object) -> int | None:
    """Processors to compute on, `None` for all that may be used; raises as `checked_whole`."""
    if threads is None:
        return None
    return checked_whole("threads", threads, max(MAX_THREADS, machine.usable_cpus()))
