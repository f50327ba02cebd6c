"""The definition of decoding: Pillow, and NumPy for what Pillow leaves open. `visionfast.preprocess.decode` has
the rule in words; this is the rule as code. Slow where that is clearer.

Pillow's plug-in classes are called by name instead of through `Image.open`: that keeps the kinds to the listed
ones (no PostScript, no plug-in of somebody else's), and leaves `Image.MAX_IMAGE_PIXELS` and its warning, which
are the whole process's, alone. `ImageFile.LOAD_TRUNCATED_IMAGES` is process-wide too; here a failed image hands
out its rows so far instead.
"""

from __future__ import annotations

import contextlib
import io
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ImageFormatError, ImageTooLargeError, ImageTruncatedError
from visionfast.preprocess.formats import (
    ImageKind,
    exif_orientation,
    gif_extent_hw,
    png_essentials,
    read_jpeg_header,
    sniff,
    webp_canvas_hw,
)

if TYPE_CHECKING:
    from PIL import ImageFile

__all__ = ["DecodeLimits", "decode_reference", "jpeg_is_damaged", "oriented"]


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What an image may cost, decided before it is paid.

    Attributes:
        max_pixels: that the header may claim. The default, 100 million, is a 300 MB array: above any camera's
            picture in use today, and small beside a serving machine's memory.
        max_bytes: of the encoded file; a larger one is not read. The default is 256 MiB.
        allow_truncated: decode a damaged or incomplete file as far as it goes, the rest grey (JPEG) or black,
            instead of raising `ImageTruncatedError`. WebP, AVIF and JPEG 2000 have no such part and still raise.
    """

    max_pixels: int = 100_000_000
    max_bytes: int = 256 * 1024 * 1024
    allow_truncated: bool = False

    def check_bytes(self, n_bytes: int, name: str) -> None:
        """Raises `ImageTooLargeError` for a file over `max_bytes`."""
        if n_bytes > self.max_bytes:
            raise ImageTooLargeError(
                name,
                f"expected at most {self.max_bytes} bytes, got {n_bytes}; raise max_bytes or shrink the file",
            )

    def check_pixels(self, image_hw: tuple[int, int], name: str) -> None:
        """Raises `ImageTooLargeError` over `max_pixels`, `ImageFormatError` for no pixel at all."""
        height, width = image_hw
        if height < 1 or width < 1:
            raise ImageFormatError(name, f"expected an image of at least 1×1 pixels, got {width}×{height}")
        if height * width > self.max_pixels:
            raise ImageTooLargeError(
                name,
                f"expected at most {self.max_pixels} pixels, got {width}×{height} = {width * height}; "
                "raise max_pixels or shrink the image",
            )


def decode_reference(
    data: bytes, *, limits: DecodeLimits | None = None, name: str = "bytes"
) -> npt.NDArray[np.uint8]:
    """One encoded image as (H, W, 3) uint8 RGB, C-contiguous, writable, upright.

    Raises:
        ImageFormatError, ImageTruncatedError, ImageTooLargeError: as their docs say. Nothing else, whatever the
            bytes are.
    """
    limits = limits or DecodeLimits()
    limits.check_bytes(len(data), name)
    kind = sniff(data, name)
    orientation: int | None = None
    if kind == "JPEG":
        header = read_jpeg_header(data, name)
        limits.check_pixels(header.image_hw, name)
        if header.precision != 8:
            raise ImageFormatError(name, f"expected an 8-bit JPEG, got {header.precision} bits; convert it")
        orientation = header.orientation
        data = header.without_metadata(data)
        damage = jpeg_is_damaged(data, "CMYK" if header.components == 4 else "RGB")
        if damage and not limits.allow_truncated:
            raise ImageTruncatedError(name, f"the JPEG is cut short or damaged: {damage}")
        if damage and header.ordinary:
            return oriented(concealed_jpeg(data, name), orientation)
    elif kind == "PNG":
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
            pixels = _rgb(image, kind, name)
    except ImageError:
        raise
    except MemoryError:
        raise ImageTooLargeError(name, f"the {kind} does not fit into this machine's memory") from None
    except Exception as error:  # hostile bytes draw every kind of exception from a decoder
        if type(error).__name__ == "DecompressionBombError":
            raise ImageTooLargeError(name, f"Pillow refuses the {kind}: {_one_line(error)}") from None
        raise ImageFormatError(name, f"the {kind} cannot be decoded: {_one_line(error)}") from None
    if orientation is None:
        # Pillow turns a TIFF itself while loading; its rows are in order only when the load went through.
        orientation = 1 if kind == "TIFF" and complete else exif_orientation(image.info.get("exif") or b"")
    return oriented(pixels, orientation)


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


def jpeg_is_damaged(data: bytes, colorspace: str = "RGB") -> str:
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
        if any(sign in message.lower() for sign in _JPEG_DAMAGE):
            return message
    return ""


# From libjpeg's jerror.h: JWRN_JPEG_EOF, HIT_MARKER, HUFF_BAD_CODE, ARITH_BAD_CODE, MUST_RESYNC, BOGUS_PROGRESSION.
_JPEG_DAMAGE = (
    "premature end",
    "bad huffman code",
    "bad arithmetic code",
    "found marker",
    "inconsistent progression",
)


def concealed_jpeg(data: bytes, name: str) -> npt.NDArray[np.uint8]:
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
        if type(error).__name__ == "DecompressionBombError":
            raise
        if allow_truncated:
            image.tile = []  # nothing left to decode: what is in memory is what there is
            with contextlib.suppress(Exception):
                image.load()
                return False
        raise ImageTruncatedError(
            name, f"the {image.format} is cut short or damaged: {_one_line(error)}"
        ) from None
    return True


def _check_tiff_tile(image: Any, limits: DecodeLimits, name: str) -> None:
    """A TIFF of one pixel may declare tiles of gigapixels, which libtiff allocates."""
    tile_width, tile_height = image.tag_v2.get(322, 1), image.tag_v2.get(323, 1)
    limits.check_pixels((int(tile_height), int(tile_width)), name)


def _rgb(image: ImageFile.ImageFile, kind: ImageKind, name: str) -> npt.NDArray[np.uint8]:
    """A loaded image's pixels by the rule, (H, W, 3) uint8, an array of their own."""
    mode = image.mode
    if mode == "1":
        grey = np.asarray(image, dtype=np.uint8) * np.uint8(255)
    elif mode in ("L", "LA"):
        grey = np.asarray(image).reshape(image.height, image.width, -1)[:, :, 0]
    elif mode.startswith("I;16") or (mode == "I" and kind in ("PNG", "PNM")):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
    elif mode in ("P", "PA"):
        palette = np.zeros((256, 3), np.uint8)  # an index beyond the palette is black
        colours = np.array(image.getpalette("RGB") or [], np.uint8).reshape(-1, 3)[:256]
        palette[: len(colours)] = colours
        index = np.asarray(image).reshape(image.height, image.width, -1)[:, :, 0]
        return palette[index]
    elif mode in ("RGB", "RGBA", "RGBX"):
        return np.array(np.asarray(image)[:, :, :3], order="C")
    elif mode in ("CMYK", "YCbCr"):
        return np.array(image.convert("RGB"))
    else:
        raise ImageFormatError(
            name,
            f"expected 8 or 16 bits a channel, got a {kind} of mode {mode} (float or 32-bit, say); convert it",
        )
    return np.repeat(grey[:, :, None], 3, axis=2)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
