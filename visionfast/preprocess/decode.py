"""Encoded bytes, files and arrays → 8-bit RGB pixels, by one rule for every kind of image.

The rule: EXIF orientation 1–8 is applied. Grey and 1-bit become three equal channels; palettes are looked up;
alpha, of pixels, palette or tRNS entries alike, is composited over white; CMYK is converted as Pillow does (the
Adobe inversion included), without colour profiles; of 16-bit samples the high byte is kept, their tRNS entry
ignored; of several frames the first counts. Floating-point images have no stated range and are refused.

`decode_reference` (Pillow and NumPy) is the definition. Ordinary JPEGs take libjpeg-turbo's strict decoder, which
gives the same pixels faster and, unlike cv2, says when the file ends early.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, UnidentifiedImageError

from visionfast.errors import (
    ImageError,
    ImageFormatError,
    ImageNotFoundError,
    ImageTooLargeError,
    ImageTruncatedError,
)

__all__ = ["DecodeLimits", "ImageDecoder", "ImageSource", "decode_image", "decode_reference"]

ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | npt.NDArray[np.uint8]"
_Pixels: TypeAlias = "npt.NDArray[np.uint8]"

_EXIF_ORIENTATION = 0x0112
_WHITE = 255


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What an image may claim before any memory is set aside for its pixels.

    Attributes:
        max_pixels: width × height. Pillow's own bound of 89 Mpx stands for all but ordinary JPEGs.
        max_bytes: of the encoded file.
        allow_truncated: decode what is there of a file that ends early; what is missing is grey or black.
    """

    max_pixels: int = 89_000_000
    max_bytes: int = 256 << 20
    allow_truncated: bool = False


class ImageDecoder:
    """Decodes into a buffer of its own that grows and is used again; not for several threads at once.

    A fresh array for every photograph costs its page faults. `decode` therefore hands out the buffer: use what it
    returns before the next call, or copy it.
    """

    def __init__(self, limits: DecodeLimits | None = None) -> None:
        self.limits = limits or DecodeLimits()
        self._scratch = np.empty(0, np.uint8)

    def decode(self, source: ImageSource, *, name: str | None = None) -> _Pixels:
        """(H, W, 3) u8 RGB, C-contiguous, valid until the next call.

        Raises:
            ImageError: its subclass says what is wrong with this image.
        """
        if isinstance(source, np.ndarray):
            return _from_array(source, name or "array")
        if isinstance(source, (bytes, bytearray, memoryview)):
            label, data = name or "bytes", bytes(source)
        elif isinstance(source, (str, os.PathLike)):
            label = name or os.fspath(source)
            data = _read(Path(source), label, self.limits)
        else:
            raise ImageFormatError(
                name or "image", f"expected a path, bytes or an array, got {type(source).__name__}"
            )
        _check_size(label, data, self.limits)
        if data[:2] == b"\xff\xd8" and (pixels := self._jpeg(data, label)) is not None:
            return pixels
        return decode_reference(data, limits=self.limits, name=label)

    def _jpeg(self, data: bytes, name: str) -> _Pixels | None:
        """An ordinary 8-bit JPEG; `None` where the definition has to decide."""
        try:
            height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        except ValueError:
            return None
        if colorspace not in ("YCbCr", "Gray", "RGB"):
            return None
        _check_pixels(name, width, height, self.limits)
        if self._scratch.size < (needed := height * width * 3):
            self._scratch = np.empty(needed, np.uint8)
        try:
            pixels = simplejpeg.decode_jpeg(data, "RGB", strict=True, buffer=self._scratch[:needed])
        except ValueError as error:
            # Warnings about stray bytes are harmless; an early end is not, and Pillow does not always notice it.
            if "premature end" not in str(error).lower():
                return None
            if not self.limits.allow_truncated:
                raise ImageTruncatedError(name, _TRUNCATED) from error
            try:
                pixels = simplejpeg.decode_jpeg(data, "RGB", strict=False, buffer=self._scratch[:needed])
            except ValueError:
                raise ImageTruncatedError(name, "nothing of it can be decoded") from error
        orientation = _jpeg_orientation(data) if b"Exif\0\0" in data[:65536] else 1
        return _orient(pixels, orientation)


_TRUNCATED = "the file ends early or is damaged inside; --allow-truncated decodes what is there"


def decode_image(
    source: ImageSource, *, limits: DecodeLimits | None = None, name: str | None = None
) -> _Pixels:
    """A path, encoded bytes or an array → (H, W, 3) u8 RGB that belongs to the caller.

    Raises:
        ImageError: its subclass says what is wrong with this image.
    """
    pixels = ImageDecoder(limits).decode(source, name=name)
    return pixels.copy() if isinstance(source, np.ndarray) else pixels


def decode_reference(
    data: bytes, *, limits: DecodeLimits | None = None, name: str = "bytes"
) -> _Pixels:
    """The definition: encoded bytes → (H, W, 3) u8 RGB by the rule in this module's docstring.

    Raises:
        ImageError: its subclass says what is wrong with this image.
    """
    limits = limits or DecodeLimits()
    _check_size(name, data, limits)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks about odd metadata
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                _check_pixels(name, *image.size, limits)
                image.load()
                return _orient(_to_rgb(image, name), _pillow_orientation(image))
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLargeError(name, "the header claims more pixels than can be decoded safely") from error
    except UnidentifiedImageError as error:
        kind = "a JPEG of a kind" if data[:2] == b"\xff\xd8" else "a format"
        raise ImageFormatError(name, f"expected an image, got {kind} that is not decoded here") from error
    except MemoryError as error:
        raise ImageTooLargeError(name, "there is not enough memory for its pixels") from error
    except Exception as error:  # Pillow's plugins raise anything on hostile bytes: struct.error, SyntaxError, …
        if limits.allow_truncated and (pixels := _best_effort(data, limits)) is not None:
            return pixels
        raise ImageTruncatedError(name, _TRUNCATED) from error


def _best_effort(data: bytes, limits: DecodeLimits) -> _Pixels | None:
    """What cv2 makes of a damaged file; the header's claim was checked by then."""
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error:
        return None


def _read(path: Path, name: str, limits: DecodeLimits) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ImageFormatError(name, "expected an image file, got a directory")
        if not stat.S_ISREG(status.st_mode):
            raise ImageFormatError(name, "expected a regular file, got a device or a pipe")
        if status.st_size > limits.max_bytes:
            raise ImageTooLargeError(name, f"expected at most {limits.max_bytes} bytes, got {status.st_size}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ImageNotFoundError(name, "no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else None
        raise ImageNotFoundError(name, f"cannot be read ({reason or error})") from error


def _check_size(name: str, data: bytes, limits: DecodeLimits) -> None:
    if not data:
        raise ImageFormatError(name, "expected an image, got an empty file")
    if len(data) > limits.max_bytes:
        raise ImageTooLargeError(name, f"expected at most {limits.max_bytes} bytes, got {len(data)}")


def _check_pixels(name: str, width: int, height: int, limits: DecodeLimits) -> None:
    if width * height > limits.max_pixels:
        raise ImageTooLargeError(
            name, f"expected at most {limits.max_pixels} pixels, the header claims {width} × {height}"
        )


def _to_rgb(image: Image.Image, name: str) -> _Pixels:
    """A loaded Pillow image → (H, W, 3) u8, before its orientation."""
    mode = image.mode
    if mode.startswith("I"):  # 16-bit grey; Pillow widens some of them to 32-bit integers
        high = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return np.repeat(high[:, :, None], 3, axis=2)
    if mode == "F":
        raise ImageFormatError(name, "expected 8- or 16-bit samples, got floating-point ones of no stated range")
    if mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _over_white(np.asarray(image.convert("RGBA")))
    return np.array(image.convert("RGB"))


def _over_white(rgba: _Pixels) -> _Pixels:
    """(H, W, 4) u8 → (H, W, 3) u8: rgb × a + white × (1 - a), rounded half up."""
    alpha = rgba[:, :, 3:].astype(np.uint32)
    mixed = rgba[:, :, :3] * alpha + _WHITE * (255 - alpha)
    return ((2 * mixed + 255) // 510).astype(np.uint8)


def _from_array(array: npt.NDArray[np.uint8], name: str) -> _Pixels:
    channels = 1 if array.ndim == 2 else array.shape[-1] if array.ndim == 3 else 0
    if array.dtype != np.uint8 or channels not in (1, 3, 4) or array.size == 0:
        raise ImageFormatError(
            name,
            "expected an (H, W), (H, W, 1), (H, W, 3) RGB or (H, W, 4) RGBA uint8 array, "
            f"got {array.shape} {array.dtype.name}",
        )
    if channels == 4:
        return _over_white(array)
    if channels == 1:
        return np.repeat(array.reshape(*array.shape[:2], 1), 3, axis=2)
    return np.ascontiguousarray(array)


def _jpeg_orientation(data: bytes) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                return _pillow_orientation(image)
    except Exception:  # broken EXIF says nothing about the pixels
        return 1


def _pillow_orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # broken EXIF says nothing about the pixels
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _orient(pixels: _Pixels, orientation: int) -> _Pixels:
    """Undoes an EXIF orientation (Exif 2.32, tag 0x0112)."""
    if orientation == 1:
        return pixels
    if orientation >= 5:  # 5–8 are stored with rows and columns exchanged
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
