"""Encoded images in, objects out: one engine with everything around it, on the host or on a GPU.

A session owns its engine and all buffers, and answers one batch at a time. Concurrency is several sessions, never
one that threads share.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError
from visionfast.types import Detections

__all__ = ["ImageSource", "Session"]

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | npt.NDArray[np.uint8]"
"""A path, an encoded image, or a uint8 RGB array."""


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


def source_name(source: ImageSource, index: int) -> str | None:
    """What errors call an image: its path by itself, else its place in what the caller gave."""
    return None if isinstance(source, (str, os.PathLike)) else f"image {index}"
