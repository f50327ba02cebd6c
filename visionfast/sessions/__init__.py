"""Encoded images in, objects out: one engine with everything around it, on the host or on a GPU.

A session owns its engine and all buffers, and answers one batch at a time. Concurrency is several sessions, never
one that threads share.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.errors import BackendError, ImageError, ImageFormatError, OptionError, SessionBusyError, ShapeError
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.nv12 import Nv12Frame, nv12_to_rgb
from visionfast.results import Detections

if TYPE_CHECKING:
    import torch

__all__ = ["ImageSource", "Owner", "Session", "pixels_of", "source_name"]

ImageSource: TypeAlias = (
    "str | os.PathLike[str] | bytes | bytearray | memoryview | npt.NDArray[np.uint8] | Nv12Frame | torch.Tensor"
)
"""A path, an encoded image, a uint8 RGB array, a frame of video; on a GPU also a uint8 RGB tensor that is there."""


class Session(Protocol):
    """Attributes:
    batch: images that one call answers at most.
    """

    batch: int

    def answer(self, images: Sequence[ImageSource], *, first: int, raises: bool) -> list[Detections | ImageError]:
        """Answers at most `batch` images, in order.

        Args:
            images: at least one.
            first: the number of the first one among all that the caller was given, for the errors' names.
            raises: raise the first image's error instead of returning it in its place.

        Raises:
            ImageError: with `raises`.
            BackendError: the runtime failed.
            SessionBusyError: another thread is asking.
        """
        ...

    def raw(self) -> dict[str, npt.NDArray[Any]]:
        """The engine's outputs for the last batch, copied: by name, all slots."""
        ...

    def close(self) -> None:
        """Frees the engine and the buffers; closing twice is harmless."""
        ...


class Owner:
    """Who may use a session's buffers: one caller at a time, and nobody once it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Raises `SessionBusyError` where another thread is asking: an error, not a queue and not a race."""
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("session: another thread is asking it; open a session for each thread")
        try:
            if self._closed:
                raise BackendError("session: it is closed; open the engine again")
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def closing(self) -> Iterator[bool]:
        """Waits for whoever is asking. Gives whether there is something to free: the first time."""
        with self._lock:
            first, self._closed = not self._closed, True
            yield first


def source_name(source: ImageSource, index: int) -> str | None:
    """What errors call an image: its path by itself, else its place in what the caller gave."""
    return None if isinstance(source, (str, os.PathLike)) else f"image {index}"


def pixels_of(source: ImageSource, *, limits: DecodeLimits, name: str | None) -> npt.NDArray[np.uint8]:
    """What is on the host as (H, W, 3) uint8 RGB.

    Raises:
        ImageError: it is no image, a damaged one, or over the limits.
    """
    if not isinstance(source, Nv12Frame):
        return decode_image(source, limits=limits, name=name)  # type: ignore[arg-type]  # it says what it takes
    for plane, pixels in (("y", source.y), ("uv", source.uv)):
        if not isinstance(pixels, np.ndarray):
            kind = type(pixels).__name__
            raise ImageFormatError(name or "frame", f"{plane}: expected a numpy.ndarray on the host, got {kind}")
    try:
        limits.check_pixels((*source.y.shape, 0, 0)[:2], name or "frame")
        return nv12_to_rgb(source.y, source.uv, matrix=source.matrix, full_range=source.full_range)
    except (ShapeError, OptionError) as error:
        raise ImageFormatError(name or "frame", str(error)) from error
