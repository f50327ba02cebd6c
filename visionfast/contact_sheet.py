"""Contact sheets: each query at the left of its row, and its nearest images beside it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, OptionError
from visionfast.preprocess.decode import DecodeLimits, decode_image

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

__all__ = ["COLUMNS", "Row", "Tile", "contact_sheet"]

COLUMNS = 10
"""Of nearest images in a line; more of them go on in the next."""

_SIDE_MOST = 30_000  # of a sheet: viewers give up beyond, and JPEG ends at 65,535
_SIDE = 160  # of a thumbnail, pixels
_MARGIN = 12
_TEXT = 13  # the font's size
_LINE = 17  # from one line of text to the next
_CELL_W, _CELL_H = _SIDE + _MARGIN, _SIDE + 2 * _LINE + _MARGIN
_PAPER, _INK, _PALE, _GREY = (255, 255, 255), (24, 24, 24), (244, 244, 244), (200, 200, 200)
_QUERY = (37, 99, 235)  # the frame of a query

_WORDS = {
    "not-found": "missing",
    "format": "not an image",
    "truncated": "damaged",
    "too-large": "too large",
    "not-finite": "no vector",
}
"""An error's kind → what its tile says."""

_FONTS = ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf", "Arial Unicode.ttf", "arial.ttf")
"""Tried for names that Pillow's own font, which is Latin, has no letters for."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One image on a sheet.

    Attributes:
        path: where it is; `None` where that is not known.
        title: what stands first under it: `query`, or rank and similarity.
        name: what stands below that; its end is shown where it is long.
        error: what is wrong with it, where that is known before it is opened.
    """

    path: Path | None
    title: str
    name: str
    error: ImageError | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A query and its nearest images, the nearest first."""

    query: Tile
    nearest: Sequence[Tile]


def contact_sheet(rows: Sequence[Row], *, limits: DecodeLimits | None = None) -> npt.NDArray[np.uint8]:
    """The rows below one another, as one picture.

    Images are opened one at a time, as `decode_image` opens them. One that is not there, or cannot be read, is a grey
    tile with a word that says why.

    Args:
        rows: at least one.
        limits: what an image may cost; default: as everywhere, and damaged ones are shown as far as they go.

    Returns:
        (H, W, 3) uint8 RGB.

    Raises:
        OptionError: no rows, or so many that nothing would show the picture.
    """
    from PIL import Image, ImageDraw

    limits = limits or DecodeLimits(allow_truncated=True)
    lines = [max(1, -(-len(row.nearest) // COLUMNS)) for row in rows]
    height = _MARGIN + sum(lines) * _CELL_H + (len(rows) - 1) * _MARGIN
    if not rows or height > _SIDE_MOST:
        raise OptionError(
            f"contact sheet: expected 1 to {(_SIDE_MOST - _MARGIN) // (_CELL_H + _MARGIN)} lines of images, "
            f"got {sum(lines)}; ask for fewer at a time"
        )
    columns = min(COLUMNS, max(len(row.nearest) for row in rows))
    width = _MARGIN + _CELL_W + (_MARGIN + columns * _CELL_W if columns else 0)
    sheet = Image.new("RGB", (width, height), _PAPER)
    pen = ImageDraw.Draw(sheet)
    top = _MARGIN
    for row, n_lines in zip(rows, lines, strict=True):
        _paste(sheet, pen, row.query, (_MARGIN, top), limits, frame=_QUERY)
        for i, tile in enumerate(row.nearest):
            line, column = divmod(i, COLUMNS)
            _paste(sheet, pen, tile, (2 * _MARGIN + (1 + column) * _CELL_W, top + line * _CELL_H), limits)
        top += n_lines * _CELL_H
        if row is not rows[-1]:
            pen.line((_MARGIN, top, width - _MARGIN, top), _GREY)
            top += _MARGIN
    return np.array(sheet)


def _paste(
    sheet: Image.Image,
    pen: ImageDraw.ImageDraw,
    tile: Tile,
    left_top: tuple[int, int],
    limits: DecodeLimits,
    *,
    frame: tuple[int, int, int] | None = None,
) -> None:
    left, top = left_top
    right, bottom = left + _SIDE - 1, top + _SIDE - 1
    try:
        if tile.error is not None:
            raise tile.error
        if tile.path is None:
            raise ImageError(tile.name, "nothing says where it is")
        thumbnail = _thumbnail(decode_image(tile.path, limits=limits))
        pen.rectangle((left, top, right, bottom), _PALE)
        sheet.paste(thumbnail, (left + (_SIDE - thumbnail.width) // 2, top + (_SIDE - thumbnail.height) // 2))
    except ImageError as error:
        word = _WORDS.get(error.kind, "missing")
        pen.rectangle((left, top, right, bottom), _GREY)
        font = _font(latin=True)
        middle = (left + (_SIDE - font.getlength(word)) / 2, top + (_SIDE - _LINE) / 2)
        pen.text(middle, word, _INK, font)
    if frame is not None:
        pen.rectangle((left - 3, top - 3, right + 3, bottom + 3), outline=frame, width=3)
    for i, text in enumerate((tile.title, tile.name)):
        shown, font = _fitted(text)
        pen.text((left, bottom + (i + 1) * _LINE), shown, _INK, font, anchor="ls")


def _thumbnail(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """Within the thumbnail's square, its aspect kept, at least one pixel."""
    from PIL import Image

    height, width = pixels.shape[:2]
    scale = _SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def _fitted(text: str) -> tuple[str, ImageFont.FreeTypeFont | ImageFont.ImageFont]:
    """As much of the end of a text as a tile's width has room for, on one line."""
    # A name may have line breaks and tabs in it, and surrogates for bytes that are no text.
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    font = _font(latin=all(ord(c) < 0x180 or c == "…" for c in text))
    text = text[-200:]  # more have no room, and a name in a table may be of any length
    shown = text
    while shown and font.getlength(shown if shown == text else f"…{shown}") > _SIDE:
        shown = shown[1:]
    return (shown if shown == text else f"…{shown}"), font


@functools.cache
def _font(*, latin: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, the same everywhere; for other letters one of the system's, or boxes where it has none."""
    from PIL import ImageFont

    if not latin:
        for name in _FONTS:
            try:
                return ImageFont.truetype(name, _TEXT)
            except OSError:
                continue
    return ImageFont.load_default(_TEXT)
