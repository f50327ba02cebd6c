"""The rule for pixels, as code: what Pillow loaded, whatever its mode, to 8-bit RGB; alpha; orientation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageFormatError
from visionfast.preprocess.formats import ImageKind

if TYPE_CHECKING:
    from PIL import ImageFile

__all__ = ["oriented", "over_white", "rgb_of"]

_WHITE = 255


def rgb_of(image: ImageFile.ImageFile, kind: ImageKind, bit_depth: int, name: str) -> npt.NDArray[np.uint8]:
    """A loaded image's pixels by the rule, (H, W, 3) uint8, an array of their own.

    `bit_depth` is a PNG's: its colour key (`tRNS`) is in units of it, and Pillow leaves the key as it stands.
    """
    mode = image.mode
    if mode in ("CMYK", "YCbCr"):
        return np.array(image.convert("RGB"))
    raw = np.asarray(image)  # (H, W) or (H, W, C); bool, uint8, uint16 or int32
    key = image.info.get("transparency")
    if mode in ("RGB", "RGBX"):
        rgb = np.array(raw[:, :, :3], dtype=np.uint8, order="C")
        if isinstance(key, tuple) and bit_depth == 8:
            rgb[(rgb == key).all(axis=2)] = _WHITE
        return rgb
    if mode == "RGBA":
        return over_white(raw)
    if mode in ("P", "PA"):
        table = np.zeros((256, 4), np.uint8)  # an index beyond the palette is black
        table[:, 3] = 255
        colours = np.array(image.getpalette("RGB") or [], np.uint8).reshape(-1, 3)[:256]
        table[: len(colours), :3] = colours
        if isinstance(key, bytes):
            table[: len(key), 3] = np.frombuffer(key[:256], np.uint8)
        elif isinstance(key, int) and key < 256:
            table[key, 3] = 0
        rgba = table[raw if mode == "P" else raw[:, :, 0]]
        if mode == "PA":
            rgba[:, :, 3] = raw[:, :, 1]
        return over_white(rgba)
    if mode == "LA":
        return over_white(raw[:, :, [0, 0, 0, 1]])
    if mode == "1":
        grey = raw.astype(np.uint8) * np.uint8(255)
    elif mode == "L":
        grey = raw.copy()
        key = key * {1: 255, 2: 85, 4: 17}.get(bit_depth, 1) if isinstance(key, int) else None
    elif mode.startswith("I;16") or (mode == "I" and kind in ("PNG", "PNM")):
        grey = (raw >> 8).astype(np.uint8)
    else:
        raise ImageFormatError(
            name,
            f"expected 8 or 16 bits a channel, got a {kind} of mode {mode} (float, 32-bit); convert it",
        )
    if isinstance(key, int):
        grey[raw == key] = _WHITE
    return np.repeat(grey[:, :, None], 3, axis=2)


def over_white(rgba: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(H, W, 4) → (H, W, 3) uint8: `colour × alpha + white × (1 - alpha)`, rounded to the nearest."""
    alpha = rgba[:, :, 3:].astype(np.uint16)
    mixed = rgba[:, :, :3] * alpha  # up to 255 · 255: sixteen bits hold it, with the white and the rounding
    mixed += np.uint16(_WHITE) * (np.uint16(255) - alpha)
    mixed += np.uint16(127)  # 255 is odd: there are no halves
    mixed //= np.uint16(255)
    return np.ascontiguousarray(mixed, dtype=np.uint8)


def oriented(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """`pixels` (H, W, C) turned upright, C-contiguous; the same array for orientation 1.

    EXIF names where the stored picture's first row and first column belong: 5 to 8 swap the axes.
    """
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):  # rows run upwards
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):  # columns run leftwards
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
