"""Image bytes, files and arrays to (H, W, 3) uint8 RGB, by one rule.

The rule, for every kind of input:

- the first frame, turned upright by its EXIF orientation; one that is broken counts as upright;
- grey is replicated into the three channels; 1-bit is 0 and 255; a palette is looked up;
- alpha is composited over white: `colour × alpha + 255 × (1 - alpha)`, rounded. The same for PNG,
  WebP, GIF, TIFF, palettes with transparency, PNG's colour keys and (H, W, 4) arrays. It is the page that the
  picture was drawn for; dropping alpha, as cv2 does, shows whatever lies under the transparent pixels. (Only
  the colour key of a 16-bit RGB PNG is ignored: Pillow no longer has the sixteen bits.)
- 16 bits become 8 by the high byte, `value >> 8`;
- CMYK becomes RGB as `(255 - C)(255 - K) / 255`, Adobe's inversion taken into account;
- colour profiles and gamma are ignored: the stored numbers are the pixels;
- float and 32-bit images are refused: nothing says which of their values is white.

`decode_reference` is the definition. Ordinary JPEGs (8-bit, grey or colour) take a faster way with identical
pixels: libjpeg-turbo straight into the array, and orientation by OpenCV.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageFormatError, ImageNotFoundError
from visionfast.preprocess.formats import read_jpeg_header
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.pixels import oriented, over_white
from visionfast.preprocess.reference_decode import decode_reference

__all__ = ["DecodeLimits", "decode_image", "decode_reference", "read_image_file"]

_DEFAULT_LIMITS = DecodeLimits()


def decode_image(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | npt.NDArray[Any],
    *,
    limits: DecodeLimits = _DEFAULT_LIMITS,
    name: str | None = None,
) -> npt.NDArray[np.uint8]:
    """One image as (H, W, 3) uint8 RGB, C-contiguous, upright.

    Args:
        source: a path, an encoded image, or a uint8 RGB array (H, W), (H, W, 1), (H, W, 3), (H, W, 4). An
            array is never modified; one that is right already is returned as it is, not copied.
        limits: what the image may cost.
        name: `ImageError.source` of the errors; otherwise the path, `"bytes"` or `"array"`.

    Raises:
        ImageNotFoundError: the path is no readable regular file.
        ImageFormatError: no image, or one of a kind that is not decoded here.
        ImageTruncatedError: the file ends early or is damaged inside, unless `limits.allow_truncated`.
        ImageTooLargeError: over the limits, found out before pixels are allocated.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source, limits, name or "array")
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_bytes(bytes(source), limits, name or "bytes")
    if isinstance(source, (str, os.PathLike)):
        name = name or os.fspath(source)
        return _from_bytes(read_image_file(source, limits=limits, name=name), limits, name)
    raise ImageFormatError(
        name or type(source).__name__,
        f"expected a path, encoded bytes or a uint8 RGB array, got {type(source).__name__}; "
        "numpy.asarray(image) makes an array of a Pillow image or a tensor",
    )


def read_image_file(
    path: str | os.PathLike[str], *, limits: DecodeLimits = _DEFAULT_LIMITS, name: str | None = None
) -> bytes:
    """The bytes of a regular file within `limits.max_bytes`.

    Raises:
        ImageNotFoundError: missing, unreadable, a directory, a pipe or a device.
        ImageTooLargeError: too many bytes; it is not read then.
    """
    name = name or os.fspath(path)
    if not os.fspath(path):
        raise ImageNotFoundError(name or "path", "expected the path of an image file, got an empty one")
    try:
        # Looked at before it is opened: opening a pipe waits for its writer, and a device may do anything.
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            raise ImageNotFoundError(name, "expected an image file, got a directory")
        if not stat.S_ISREG(mode):
            raise ImageNotFoundError(name, "expected a regular file, got a pipe, socket or device")
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            limits.check_bytes(size, name)
            data = file.read(size + 1)  # Python makes room for all that is asked for
            if len(data) > size:  # it grows
                data += file.read(limits.max_bytes + 1 - len(data))
    except FileNotFoundError:
        raise ImageNotFoundError(name, "no such file") from None
    except PermissionError:
        raise ImageNotFoundError(name, "the file may not be read; check its permissions") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ImageNotFoundError(name, f"the file cannot be read: {reason}") from None
    limits.check_bytes(len(data), name)
    if not data:
        raise ImageFormatError(name, "expected an image, got an empty file")
    return data


def _from_bytes(data: bytes, limits: DecodeLimits, name: str) -> npt.NDArray[np.uint8]:
    limits.check_bytes(len(data), name)
    if data.startswith(b"\xff\xd8\xff"):
        header = read_jpeg_header(data, name)
        limits.check_pixels(header.image_hw, name)
        if header.ordinary:
            import simplejpeg

            try:
                pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=True)
            except ValueError:
                pass  # a warning or an error of libjpeg-turbo: the definition says which is which
            else:
                return _turned(pixels, header.orientation)
    return decode_reference(data, limits=limits, name=name)


def _turned(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """As `oriented`; OpenCV rotates in tiles, where NumPy's copy misses the cache at every pixel."""
    if orientation in (1, 2, 4, 5, 7):  # not turned, or so rare that speed does not matter
        return oriented(pixels, orientation)
    import cv2

    turns = {3: cv2.ROTATE_180, 6: cv2.ROTATE_90_CLOCKWISE, 8: cv2.ROTATE_90_COUNTERCLOCKWISE}
    return np.ascontiguousarray(cv2.rotate(pixels, turns[orientation]), dtype=np.uint8)


def _from_array(array: npt.NDArray[Any], limits: DecodeLimits, name: str) -> npt.NDArray[np.uint8]:
    shape_is_right = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if array.dtype != np.uint8 or not shape_is_right or array.size == 0:
        raise ImageFormatError(
            name,
            f"expected a uint8 RGB array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), got {array.shape} {array.dtype}",
        )
    limits.check_pixels((array.shape[0], array.shape[1]), name)
    channels = array[:, :, None] if array.ndim == 2 else array
    if channels.shape[2] == 1:
        return np.tile(channels, (1, 1, 3))
    if channels.shape[2] == 4:
        return over_white(np.asarray(channels))
    return np.ascontiguousarray(channels)
