"""A folder of pictures to embed, what stands beside a table, and how a job is stopped."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
from small_embedder import pictures

from visionfast.embed_run import Progress
from visionfast.embed_table import Row, read_rows

__all__ = ["StoppedError", "beside", "deep_folder", "rows_of", "stop_at", "write_photos"]

_NAMES = (
    *("b.jpg", "a.png", "sub/c.jpg", "sub/deep/d.jpg", "e.jpg", "sub.jpg"),
    *("f.bmp", "g.webp", "h.jpg", "ü.jpg", "z.jpg"),
)


def write_photos(folder: Path) -> Path:
    """Eleven pictures in three folders, and another file beside them."""
    for name, pixels in zip(_NAMES, pictures(len(_NAMES)), strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(path.suffix, pixels)[1].tobytes())
    (folder / "notes.txt").write_text("no picture")
    return folder


def deep_folder(top: Path) -> str:
    """Makes folders in one another, so deep that no path leads to the last, not even root's.

    Returns:
        its path, from `top`'s own name on.
    """
    name, levels = "d" * 250, 20
    top.mkdir(parents=True)
    place = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=place)
        below = os.open(name, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    os.close(place)
    return "/".join([top.name, *[name] * levels])


def beside(output: Path) -> list[str]:
    """Names of all that is in the table's folder."""
    return sorted(os.listdir(output.parent))  # noqa: PTH208


def rows_of(output: Path) -> dict[str, Row]:
    return {os.fsdecode(row.path): row for row in read_rows(output)}


class StoppedError(Exception):
    """In the middle of something."""


def stop_at(count: int, kind: type[BaseException] = StoppedError) -> Progress:
    """Raises `kind` once that many files have an answer."""

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "embedding" and done == count:
            raise kind

    return progress
