"""What an image file says about itself, read from its bytes without decoding a pixel.

Only what must be known before a decoder may be let loose on the bytes: the kind, the size that the header
claims, the EXIF orientation, and whether the container is complete. Sizes of the other kinds (BMP, TIFF, PNM,
JPEG 2000, AVIF) are asked of Pillow, whose constructors for them allocate no pixels.

Sources: ITU-T T.81 (JPEG), W3C PNG (third edition), CompuServe GIF89a, RFC 9649 (WebP), CIPA DC-008 (EXIF).
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from typing import Literal, TypeAlias

from visionfast.errors import ImageFormatError, ImageTruncatedError

__all__ = [
    "DAMAGE_REMEDY",
    "ImageKind",
    "JpegHeader",
    "exif_orientation",
    "gif_extent_hw",
    "png_essentials",
    "read_jpeg_header",
    "sniff",
    "webp_canvas_hw",
]

ImageKind: TypeAlias = Literal["JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", "AVIF", "JPEG 2000", "PNM"]

_SIGNATURES: tuple[tuple[bytes, ImageKind], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),  # bare codestream
    (b"P4", "PNM"),
    (b"P5", "PNM"),
    (b"P6", "PNM"),
)
_AVIF_BRANDS = (b"avif", b"avis")
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")

WHOLE_FILE = "; a whole file is needed"
DAMAGE_REMEDY = f"{WHOLE_FILE}, unless truncated images are allowed (--allow-truncated, DecodeLimits.allow_truncated)"

_JPEG_MARKER = re.compile(rb"\xff[^\xff]", re.DOTALL)  # after any number of fill bytes

# A JPEG of millions of tiny segments, or a progressive one of thousands of scans, is valid and takes minutes
# to walk or to decode. Encoders write about ten scans; the standard's own progression can need a few dozen.
_MAX_JPEG_SEGMENTS = 10_000
_MAX_JPEG_SCANS = 100


def sniff(data: bytes, name: str) -> ImageKind:
    """The kind of image that `data` begins as.

    Raises:
        ImageFormatError: it begins as none of the kinds that are decoded here.
    """
    for signature, kind in _SIGNATURES:
        if data.startswith(signature):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[4:8] == b"ftyp":
        brands = data[8 : min(struct.unpack(">I", data[:4])[0], 256)]
        if any(brand in brands for brand in _AVIF_BRANDS):
            return "AVIF"
        if any(brand in brands for brand in _HEIC_BRANDS):
            raise ImageFormatError(name, "HEIC is not decoded here; convert it to JPEG or PNG")
    if not data:
        raise ImageFormatError(name, "expected an image, got 0 bytes")
    raise ImageFormatError(
        name,
        "expected a JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF, JPEG 2000 or binary PNM image, "
        f"got {len(data)} bytes that begin with {data[:8]!r}",
    )


def exif_orientation(exif: bytes) -> int:
    """The orientation, 1 to 8, of an EXIF block, with or without `Exif\\0\\0` in front; 1 where it has none.

    A block that is broken, or that says something else than 1 to 8, counts as 1: viewers do the same, and
    metadata must not cost the picture. Orientation in XMP is not read, as in OpenCV and DALI.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, value_type, count = struct.unpack_from(order + "HHI", tiff, entry)
            if tag == 0x0112:
                if value_type not in (3, 4) or count != 1:  # SHORT, LONG
                    return 1
                (value,) = struct.unpack_from(order + ("H" if value_type == 3 else "I"), tiff, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


@dataclass(frozen=True, slots=True)
class JpegHeader:
    """What stands before a JPEG's first scan.

    Attributes:
        image_hw: pixels, before orientation.
        precision: bits a sample.
        components: 1 grey, 3 colour, 4 CMYK.
        orientation: EXIF, 1 to 8.
        metadata: byte ranges of the segments that no pixel depends on.
    """

    image_hw: tuple[int, int]
    precision: int
    components: int
    orientation: int
    metadata: tuple[tuple[int, int], ...]

    @property
    def ordinary(self) -> bool:
        """8-bit grey or colour: what the fast decoder takes."""
        return self.precision == 8 and self.components in (1, 3)

    def without_metadata(self, data: bytes) -> bytes:
        """The file without comments, EXIF, XMP, ICC: nothing in them can then upset a decoder."""
        kept, position = [], 0
        for start, stop in self.metadata:
            kept.append(data[position:start])
            position = stop
        kept.append(data[position:])
        return b"".join(kept)


def read_jpeg_header(data: bytes, name: str) -> JpegHeader:
    """Walks the segments up to the first scan.

    Raises:
        ImageTruncatedError: the bytes end before the first scan.
        ImageFormatError: no frame before the first scan, or more scans or segments than any encoder writes.
    """
    frame: tuple[int, int, int, int] | None = None  # precision, height, width, components
    orientation = None
    metadata = []
    progressive = False
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        found = _JPEG_MARKER.search(data, position)  # libjpeg, too, skips what is between segments
        if found is None:
            raise ImageTruncatedError(name, f"the JPEG ends inside its header, after {len(data)} bytes")
        position = found.end()
        start, marker = position - 2, data[position - 1]
        if marker == 0 or marker == 0x01 or 0xD0 <= marker <= 0xD8:  # stands alone
            continue
        if marker == 0xD9:
            raise ImageTruncatedError(name, "the JPEG ends before its first scan")
        length = int.from_bytes(data[position : position + 2].ljust(2, b"\xff"), "big")
        if length < 2:
            raise ImageFormatError(name, f"JPEG segment 0x{marker:02x} has no length")
        if position + length > len(data):
            raise ImageTruncatedError(name, f"the JPEG ends inside its header, after {len(data)} bytes")
        body = position + 2
        position += length
        if marker == 0xDA:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if frame is not None or length < 8:
                raise ImageFormatError(name, "the JPEG has a broken or a second frame header")
            frame = struct.unpack_from(">BHHB", data, body)
            progressive = marker in (0xC2, 0xC6, 0xCA, 0xCE)
        elif marker == 0xE1 and orientation is None and data.startswith(b"Exif\0\0", body):
            orientation = exif_orientation(data[body:position])
        if marker == 0xFE or (0xE1 <= marker <= 0xEF and marker != 0xEE):  # not JFIF, not Adobe
            metadata.append((start, position))
    else:
        raise ImageFormatError(name, f"the JPEG has over {_MAX_JPEG_SEGMENTS} segments before its first scan")
    if frame is None:
        raise ImageFormatError(name, "the JPEG has no frame header before its first scan")
    if progressive and data.count(b"\xff\xda", start) > _MAX_JPEG_SCANS:
        raise ImageFormatError(name, f"the progressive JPEG has more than {_MAX_JPEG_SCANS} scans")
    precision, height, width, components = frame
    return JpegHeader((height, width), precision, components, orientation or 1, tuple(metadata))


def png_essentials(data: bytes, name: str, *, allow_truncated: bool) -> tuple[bytes, tuple[int, int], int]:
    """A PNG's pixels and nothing else: (the file reduced to IHDR, PLTE, tRNS, IDAT and IEND;
    `(H, W)`; orientation).

    Animation (`acTL`), colour profiles and text are left out: the rule for pixels ignores them all, and what
    is not there cannot be a text bomb or a broken profile.

    Raises:
        ImageTruncatedError: the file ends before IEND, or one of those chunks fails its checksum, unless
            `allow_truncated`.
        ImageFormatError: it does not begin with IHDR.
    """
    if data[12:16] != b"IHDR" or len(data) < 33:
        if len(data) < 33:
            raise ImageTruncatedError(name, f"the PNG ends inside its header, after {len(data)} bytes")
        raise ImageFormatError(name, f"the PNG is damaged{WHOLE_FILE}")
    width, height = struct.unpack_from(">II", data, 16)
    orientation = 1
    kept = [data[:8]]
    position = 8
    view = memoryview(data)
    complete = False
    while not complete and position + 12 <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        stop = position + 12 + length
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            whole = stop <= len(data)
            if not allow_truncated and whole:
                checksum = int.from_bytes(data[stop - 4 : stop], "big")
                if zlib.crc32(view[position + 4 : stop - 4]) != checksum:
                    word = kind.decode("ascii")
                    raise ImageTruncatedError(name, f"the PNG's {word} chunk fails its checksum{DAMAGE_REMEDY}")
            kept.append(data[position:stop])
            complete = kind == b"IEND" and whole
        elif kind == b"eXIf":
            orientation = exif_orientation(data[position + 8 : stop - 4])
        position = stop
    if not complete and not allow_truncated:
        raise ImageTruncatedError(name, f"the PNG ends after {len(data)} bytes, without IEND{DAMAGE_REMEDY}")
    return b"".join(kept), (height, width), orientation


def gif_extent_hw(data: bytes, name: str) -> tuple[int, int]:
    """`(H, W)` that a GIF's screen and first frame claim together, pixels.

    Raises:
        ImageTruncatedError: the bytes end before the first frame.
        ImageFormatError: something else than a block stands where a block should be.
    """
    try:
        width, height, flags = struct.unpack_from("<HHB", data, 6)
        position = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)
        while data[position] == 0x21:  # extensions, each a chain of sub-blocks
            position += 2
            while data[position]:
                position += data[position] + 1
            position += 1
        if data[position] != 0x2C:
            raise ImageFormatError(name, f"expected a frame in the GIF, got byte 0x{data[position]:02x}")
        left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, position + 1)
    except (struct.error, IndexError):
        raise ImageTruncatedError(name, f"the GIF ends before its first frame, at {len(data)} bytes") from None
    return max(height, top + frame_height), max(width, left + frame_width)


def webp_canvas_hw(data: bytes, name: str) -> tuple[int, int]:
    """`(H, W)` of a WebP's canvas, pixels.

    Raises:
        ImageTruncatedError: the bytes end before what the RIFF header declares: libwebp decodes no part.
        ImageFormatError: the first chunk is none of VP8, VP8L, VP8X.
    """
    declared = int.from_bytes(data[4:8], "little") + 8
    if len(data) < declared or len(data) < 30:
        raise ImageTruncatedError(name, f"the WebP declares {declared} bytes, got {len(data)}; send it whole")
    chunk = data[12:16]
    if chunk == b"VP8X":
        return int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return height & 0x3FFF, width & 0x3FFF
    raise ImageFormatError(name, f"expected a VP8, VP8L or VP8X chunk in the WebP, got {chunk!r}")
