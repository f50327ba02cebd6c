"""The definition of decoding: Pillow, and NumPy for what Pillow leaves open.

`visionfast.preprocess.decode` has the rule in words; this is the rule as code. Slow where that is clearer.

Pillow's plug-in classes are called by name instead of through `Image.open`: that keeps the kinds to the
listed ones (no PostScript, no plug-in of somebody else's), and leaves `Image.MAX_IMAGE_PIXELS` and its
warning, which are the whole process's, alone. `ImageFile.LOAD_TRUNCATED_IMAGES` is process-wide too; here a
failed image hands out its rows so far instead.
"""

from __future__ import annotations

import contextlib
import io
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ImageFormatError, ImageTooLargeError, ImageTruncatedError
from visionfast.preprocess.formats import (
    DAMAGE_REMEDY,
    ImageKind,
    exif_orientation,
    gif_extent_hw,
    png_essentials,
    read_jpeg_header,
    sniff,
    webp_canvas_hw,
)
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.pixels import oriented, rgb_of

if TYPE_CHECKING:
    from PIL import ImageFile

__all__ = ["decode_reference"]


def decode_reference(data: bytes, *, limits: DecodeLimits | None = None, name: str = "bytes") -> npt.NDArray[np.uint8]:
    """One encoded image as (H, W, 3) uint8 RGB, C-contiguous, writable, upright.

    Raises:
        ImageFormatError, ImageTruncatedError, ImageTooLargeError: as their docs say. Nothing
            else, whatever the bytes are.
    """
    limits = limits or DecodeLimits()
    limits.check_bytes(len(data), name)
    kind = sniff(data, name)
    orientation: int | None = None
    bit_depth = 8
    if kind == "JPEG":
        header = read_jpeg_header(data, name)
        limits.check_pixels(header.image_hw, name)
        if header.precision != 8:
            raise ImageFormatError(name, f"expected an 8-bit JPEG, got {header.precision} bits; convert it")
        orientation = header.orientation
        data = header.without_metadata(data)
        damage = _jpeg_damage(data, "CMYK" if header.components == 4 else "RGB")
        if damage and not limits.allow_truncated:
            raise ImageTruncatedError(name, f"the JPEG is cut short or damaged: {damage}{DAMAGE_REMEDY}")
        if damage and header.ordinary:
            return oriented(_concealed_jpeg(data, name), orientation)
    elif kind == "PNG":
        bit_depth = data[24] if len(data) > 24 else 0
        data, image_hw, orientation = png_essentials(data, name, allow_truncated=limits.allow_truncated)
        limits.check_pixels(image_hw, name)
    elif kind == "GIF":
        limits.check_pixels(gif_extent_hw(data, name), name)
    elif kind == "WebP":
        limits.check_pixels(webp_canvas_hw(data, name), name)

    try:
        with _quiet(kind):
            image = _constructor(kind)(io.BytesIO(data))
            limits.check_pixels((image.height, image.width), name)
            if kind == "TIFF":
                _check_tiff_tile(image, limits, name)
            complete = _load(image, name, allow_truncated=limits.allow_truncated)
            pixels = rgb_of(image, kind, bit_depth, name)
    except ImageError:
        raise
    except MemoryError:
        raise ImageTooLargeError(name, f"the {kind} does not fit into this machine's memory") from None
    except Exception as error:  # hostile bytes draw every kind of exception from a decoder
        if _is_bomb(error):
            raise ImageTooLargeError(name, f"Pillow refuses the {kind}: {_one_line(error)}") from None
        raise ImageFormatError(name, f"the {kind} cannot be decoded: {_one_line(error)}") from None
    if orientation is None:
        # Pillow turns a TIFF itself while loading; its rows are in order only when the load went through.
        orientation = 1 if kind == "TIFF" and complete else exif_orientation(image.info.get("exif") or b"")
    return oriented(pixels, orientation)


def _jpeg_damage(data: bytes, colorspace: str = "RGB") -> str:
    """libjpeg-turbo's word for the damage inside a JPEG, or an empty string.

    Pillow decodes a JPEG with damage inside without a word and cv2 one that ends early. Warnings that leave
    the pixels whole (padding before a marker, odd JFIF numbers) are not damage. What libjpeg-turbo does not
    decode at all is for Pillow to judge.
    """
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, colorspace, strict=True)
    except ValueError as error:
        message = _one_line(error)
        if any(sign in message.lower() for sign in _DAMAGE_SIGNS):
            return message
    return ""


# From libjpeg's jerror.h: JWRN_JPEG_EOF, HIT_MARKER, HUFF_BAD_CODE, ARITH_BAD_CODE, MUST_RESYNC,
# BOGUS_PROGRESSION (the last one also bounds the scans that a progressive file can ask for).
_DAMAGE_SIGNS = (
    "premature end",
    "bad huffman code",
    "bad arithmetic code",
    "found marker",
    "inconsistent progression",
)


def _concealed_jpeg(data: bytes, name: str) -> npt.NDArray[np.uint8]:
    """A damaged grey or colour JPEG as far as it goes, the rest as libjpeg-turbo fills it: mid-grey."""
    import simplejpeg

    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=False)
    except ValueError as error:
        raise ImageTruncatedError(name, f"nothing of the JPEG can be decoded: {_one_line(error)}") from None
    return pixels


def _constructor(kind: ImageKind) -> type[ImageFile.ImageFile]:
    """Pillow's class for one kind; each is imported only when such an image comes."""
    if kind == "JPEG":
        from PIL.JpegImagePlugin import JpegImageFile

        return JpegImageFile
    if kind == "PNG":
        from PIL.PngImagePlugin import PngImageFile

        return PngImageFile
    if kind == "WebP":
        from PIL.WebPImagePlugin import WebPImageFile

        return WebPImageFile
    if kind == "GIF":
        from PIL.GifImagePlugin import GifImageFile

        return GifImageFile
    if kind == "BMP":
        from PIL.BmpImagePlugin import BmpImageFile

        return BmpImageFile
    if kind == "TIFF":
        from PIL.TiffImagePlugin import TiffImageFile

        return TiffImageFile
    if kind == "JPEG 2000":
        from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile

        return Jpeg2KImageFile
    if kind == "PNM":
        from PIL.PpmImagePlugin import PpmImageFile

        return PpmImageFile
    from PIL.AvifImagePlugin import AvifImageFile  # Pillow 11.3 and later

    return AvifImageFile


# Pillow warns of odd TIFF tags and GIF sizes through `warnings`, whose filters are the process's.
_warnings_lock = threading.Lock()


@contextlib.contextmanager
def _quiet(kind: ImageKind) -> Iterator[None]:
    """Silences Pillow for the two kinds that it warns about; the others decode in parallel threads."""
    if kind not in ("TIFF", "GIF"):
        yield
        return
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _load(image: ImageFile.ImageFile, name: str, *, allow_truncated: bool) -> bool:
    """Decodes the first frame; whether all of it came."""
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # as above
        if _is_bomb(error):
            raise
        if allow_truncated:
            image.tile = []  # nothing left to decode: what is in memory is what there is
            with contextlib.suppress(Exception):
                image.load()
                return False
        reason = f"the {image.format} is cut short or damaged: {_one_line(error)}{DAMAGE_REMEDY}"
        raise ImageTruncatedError(name, reason) from None
    return True


def _check_tiff_tile(image: Any, limits: DecodeLimits, name: str) -> None:
    """A TIFF of one pixel may declare tiles of gigapixels, which libtiff allocates."""
    tile_width, tile_height = image.tag_v2.get(322, 1), image.tag_v2.get(323, 1)
    limits.check_pixels((int(tile_height), int(tile_width)), name)


def _is_bomb(error: Exception) -> bool:
    """Pillow's own limit, where its plug-in checks before visionfast can."""
    from PIL import Image

    return isinstance(error, Image.DecompressionBombError)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
