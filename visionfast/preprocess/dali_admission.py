"""Which encoded images may go to DALI, and in what form; decided by their bytes before a decoder sees them.

DALI 2.4 reads metadata by rules of its own: it turns an image by an EXIF orientation of the wrong type or count
that everything else ignores, and a JPEG with two EXIF blocks (90° in the first, 180° in the second) makes it write
past its buffer and ends the process. So it gets the image alone, with an EXIF block of our own where it is to be
turned.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from visionfast.errors import ImageError
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.formats import JpegHeader, png_essentials, read_jpeg_header, sniff
from visionfast.preprocess.limits import DecodeLimits
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["Admission", "admit", "scan_damage", "too_long"]

_LONGEST = 16  # times as long as it is wide, at most


@dataclass(frozen=True, slots=True)
class Admission:
    """An image that DALI decodes as the definition does.

    Attributes:
        encoded: the image without what no pixel depends on.
        image_hw: pixels, upright.
    """

    encoded: bytes
    image_hw: tuple[int, int]


def admit(data: bytes, *, limits: DecodeLimits, name: str) -> Admission | str:
    """An image for DALI; or why it is none, in a few words.

    Admitted are 8-bit grey and colour JPEGs, and opaque, upright 8-bit PNGs. Alpha, palettes, CMYK, 16 bits and the
    other kinds DALI decodes by other rules, or not at all.

    Raises:
        ImageFormatError, ImageTruncatedError, ImageTooLargeError: refused by its header, on every route.
    """
    limits.check_bytes(len(data), name)
    kind = sniff(data, name)
    if kind == "JPEG":
        header = read_jpeg_header(data, name)
        limits.check_pixels(header.image_hw, name)
        if not header.ordinary:
            return f"a JPEG of {header.components} components, {header.precision} bits each"
        if not data.rstrip(b"\0").endswith(b"\xff\xd9"):
            return "a JPEG without its end marker"  # it may be cut short, which DALI may not mention
        encoded = _plain_jpeg(data, header)
        if not _is_gapless(encoded):
            return "a JPEG with something between its header's segments"
        height, width = header.image_hw
        return Admission(encoded, (width, height) if header.orientation >= 5 else (height, width))
    if kind == "PNG":
        encoded, image_hw, orientation = png_essentials(data, name, allow_truncated=limits.allow_truncated)
        limits.check_pixels(image_hw, name)
        depth, colour_type = data[24], data[25]
        if depth != 8 or colour_type not in (0, 2) or b"tRNS" in encoded:
            return f"a PNG of {depth} bits and colour type {colour_type}, or with a transparent colour"
        return Admission(encoded, image_hw) if orientation == 1 else "a PNG that is not upright"
    return f"a {kind}"


def too_long(placed: Letterbox, spec: PreprocessSpec) -> str:
    """Why an image of this shape is not for DALI, in a few words; empty where it is.

    DALI makes the whole image that a `centre-crop` is the middle of, and whole rows of a `stretch`: 1 × 5,000 pixels
    became 256 × 1,280,000. The CPU's preprocessor computes what is looked at.
    """
    (image_h, image_w), (h, w) = placed.image_hw, spec.cover_hw or spec.size_hw
    ratio = max(image_h * w / (image_w * h), image_w * h / (image_h * w))
    if spec.resize == "letterbox" or ratio <= _LONGEST:
        return ""
    return f"{image_w}×{image_h} pixels are {ratio:.0f} times longer than the input"


def _plain_jpeg(data: bytes, header: JpegHeader) -> bytes:
    """The JPEG without metadata but its orientation, unless that is upright."""
    plain = header.without_metadata(data)
    if header.orientation == 1:
        return plain
    # TIFF, little-endian: one directory of one entry, tag 0x0112, one SHORT.
    tiff = struct.pack("<2sHIHHHIHxxI", b"II", 42, 8, 1, 0x0112, 3, 1, header.orientation, 0)
    exif = b"Exif\0\0" + tiff
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", 2 + len(exif)) + exif + plain[2:]


def _is_gapless(data: bytes) -> bool:
    """Whether a JPEG's header is segments back to back, so that every parser finds the same frame in it."""
    position = 2
    while data[position] == 0xFF:
        marker = data[position + 1]
        if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD9:  # no segment
            return False
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == 0xDA:
            return True
    return False


def scan_damage(data: bytes, *, limits: DecodeLimits, name: str) -> ImageError | None:
    """What `decode_image` has against the scans of an admitted image, which DALI decodes without a word.

    A JPEG's damage inside its scans shows only to whoever reads all of its coefficients: a walk over its markers
    finds next to none of it. Decoding in grey at an eighth of the size reads them all and makes hardly a pixel;
    libjpeg-turbo then warns exactly where it warns of the whole picture. It takes about half of a full decode,
    and does not hold the interpreter's lock.
    """
    if limits.allow_truncated or not data.startswith(b"\xff\xd8"):  # a PNG's checksums are verified by `admit`
        return None
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1, strict=True)
    except ValueError:  # not every warning is damage: the definition says which is which
        try:
            decode_image(data, limits=limits, name=name)
        except ImageError as error:
            return error
    return None
