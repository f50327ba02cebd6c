"""Errors as values: one request's error is that request's answer."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from visionfast.errors import ServerError, VisionfastError

__all__ = ["guarded"]

_T = TypeVar("_T")


def guarded(work: Callable[..., _T], *args: Any) -> _T | VisionfastError:
    """What `work` gives, or the error that it raised: what nobody foresaw is in the log, and harms nobody else.

    The error comes without its traceback, which holds every frame on the way, and those the request and its images:
    with the frame that keeps the error, a cycle of megabytes that stays until the collector comes by.
    """
    try:
        return work(*args)
    except VisionfastError as error:
        return error.with_traceback(None)
    except Exception as error:
        traceback.print_exc()
        told = " ".join(str(error).split())
        return ServerError(f"{type(error).__name__}: {told} (a defect of visionfast; the server's log shows where)")
