"""What is wrong, on its way to the client: with one image, as its row of `problem`; with a request, as a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from visionfast import errors
from visionfast.errors import ImageError, ServerError, VisionfastError
from visionfast.serving.wire.tensors import OURS, pack_rows

__all__ = ["fault_of", "fault_text", "pack_problems", "unpack_problem"]

_KINDS: dict[str, type[ImageError]] = {
    error.kind: error
    for error in (
        ImageError,
        errors.ImageNotFoundError,
        errors.ImageFormatError,
        errors.ImageTruncatedError,
        errors.ImageTooLargeError,
    )
}


def fault_text(error: VisionfastError) -> str:
    """What is wrong with a whole request, as the text of the server's error; `fault_of` reads it."""
    return f"visionfast.{type(error).__name__}: {error}"


def fault_of(text: str) -> VisionfastError | None:
    """The error that a stage gave as `fault_text`, out of the server's text round it; `None`: it is none of ours."""
    found = re.search(r"visionfast\.(\w+): (.*)", text, re.DOTALL)
    kind = getattr(errors, found[1], None) if found else None
    # The server's text may be any: a name in `errors` need not be a class.
    known = isinstance(kind, type) and issubclass(kind, VisionfastError) and not issubclass(kind, ImageError)
    if found is None or kind is None or not known:
        return None
    made: VisionfastError = kind(found[2])
    return made


def pack_problems(problems: Sequence[ImageError | None]) -> npt.NDArray[np.uint8]:
    """(B, m) uint8: `problem`, for B images; `unpack_problem` reads one row."""
    return pack_rows(
        [
            b""
            if error is None
            else json.dumps({"kind": error.kind, "source": error.source, "reason": error.reason}).encode()
            for error in problems
        ]
    )


def unpack_problem(row: npt.NDArray[np.uint8]) -> ImageError | None:
    """One image's row of `problem`.

    Raises:
        ServerError: it is not what `pack_problems` writes.
    """
    text = row.tobytes().rstrip(b"\0")
    if not text:
        return None
    try:
        told = json.loads(text)
        kind, source, reason = told["kind"], told["source"], told["reason"]
        if not isinstance(source, str) or not isinstance(reason, str):
            raise TypeError("expected text")
        return _KINDS[kind](source, reason)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ServerError(f"problem: expected kind, source and reason as JSON, got {text[:40]!r}; {OURS}") from error
