"""What several verbs of the command line take, and how its words are read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from visionfast.errors import OptionError

if TYPE_CHECKING:
    from visionfast.types import Resize

__all__ = ["RESIZES", "EngineArgument", "listed", "size_hw"]

EngineArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="ENGINE", help="A model's name under engines/, or NAME/VARIANT where it has several, or a folder."
    ),
]

RESIZES: dict[str, Resize] = {"crop": "centre-crop", "squash": "stretch"}
"""What `--resize` takes."""


def listed(text: str | None) -> list[str] | None:
    """`a, b` → its names. An empty one is a slip of the keyboard, and to `build` it means the whole network."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise OptionError(f"{text!r}: expected names with commas between, got an empty one")
    return names


def size_hw(text: str | None) -> tuple[int, int] | None:
    """`640` or `384x640` (height x width) → (h, w) pixels."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(re.fullmatch("[0-9]{1,6}", part) for part in parts):
        raise OptionError(f"--imgsz {text}: expected a number of pixels, or height x width, such as 384x640")
    return int(parts[0]), int(parts[-1])
