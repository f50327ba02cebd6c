"""Headers, read before any decoder sees the bytes."""

from __future__ import annotations

import contextlib
import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import ImageError, ImageFormatError, ImageTruncatedError
from visionfast.preprocess.formats import (
    exif_orientation,
    gif_extent_hw,
    png_essentials,
    read_jpeg_header,
    sniff,
    webp_canvas_hw,
)


def encoded(kind, size=(7, 5), mode="RGB", **options):
    stream = io.BytesIO()
    Image.new(mode, size).save(stream, kind, **options)
    return stream.getvalue()


def exif_block(orientation, order="<", value_type=3, count=1):
    value = struct.pack(order + ("H2x" if value_type == 3 else "I"), orientation)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    entry = struct.pack(order + "HHI", 0x0112, value_type, count) + value
    other = struct.pack(order + "HHI4x", 0x0100, 3, 1)
    return b"Exif\0\0" + head + struct.pack(order + "H", 2) + other + entry + b"\0\0\0\0"


@pytest.mark.parametrize(
    ("pillow", "kind"),
    [
        *(("JPEG", "JPEG"), ("PNG", "PNG"), ("WEBP", "WebP"), ("GIF", "GIF"), ("BMP", "BMP"), ("TIFF", "TIFF")),
        *(("AVIF", "AVIF"), ("JPEG2000", "JPEG 2000"), ("PPM", "PNM")),
    ],
)
def test_sniff(pillow, kind):
    assert sniff(encoded(pillow), "x") == kind


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "got 0 bytes"),
        (b"not an image", "begin with b'not an i'"),
        (b"%!PS-Adobe", "expected a JPEG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC is not decoded here"),
    ],
)
def test_sniff_refuses(data, message):
    with pytest.raises(ImageFormatError, match=message):
        sniff(data, "x")


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_as_pillow_reads_it(orientation, order, prefixed):
    block = exif_block(orientation, order)
    exif = Image.Exif()
    exif.load(block)
    assert exif[0x0112] == orientation
    assert exif_orientation(block if prefixed else block[6:]) == orientation


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        exif_block(0),
        exif_block(9),
        exif_block(65535),
        exif_block(6, count=2),
        exif_block(6, value_type=2),
        exif_block(6)[:-10],
    ],
    ids=["empty", "prefix", "offset beyond", "0", "9", "65535", "two values", "text", "cut short"],
)
def test_broken_orientation_is_upright(block):
    assert exif_orientation(block) == 1


@given(st.binary(max_size=200).flatmap(lambda tail: st.sampled_from([b"II*\0", b"MM\0*", b""]).map(lambda h: h + tail)))
def test_orientation_of_anything_is_1_to_8(block):
    assert exif_orientation(block) in range(1, 9)


def test_jpeg_header():
    data = encoded("JPEG", exif=exif_block(6), comment=b"hello", icc_profile=b"x" * 100)
    header = read_jpeg_header(data, "x")
    assert (header.image_hw, header.precision, header.components) == ((5, 7), 8, 3)
    assert header.orientation == 6
    assert header.ordinary
    bare = header.without_metadata(data)
    assert b"hello" not in bare
    assert b"Exif" not in bare
    assert read_jpeg_header(bare, "x").metadata == ()
    with Image.open(io.BytesIO(bare)) as without, Image.open(io.BytesIO(data)) as with_it:
        assert without.tobytes() == with_it.tobytes()


def test_cmyk_jpeg_is_not_ordinary():
    assert not read_jpeg_header(encoded("JPEG", mode="CMYK"), "x").ordinary


def test_jpeg_with_more_scans_than_an_encoder_writes():
    data = encoded("JPEG", size=(64, 64), progressive=True)
    start = data.index(b"\xff\xda")
    with pytest.raises(ImageFormatError, match="more than 100 scans"):
        read_jpeg_header(data[:-2] + data[start:-2] * 100, "x")


@pytest.mark.parametrize("keep", range(0, 400, 7))
def test_jpeg_header_cut_short(keep):
    data = encoded("JPEG", exif=exif_block(6))
    assert data.index(b"\xff\xda") > 400
    with pytest.raises(ImageTruncatedError):
        read_jpeg_header(data[:keep], "x")


def test_png_essentials_keep_the_pixels_and_the_orientation():
    data = encoded("PNG", exif=exif_block(8), icc_profile=b"x" * 100)
    essentials, image_hw, orientation = png_essentials(data, "x", allow_truncated=False)
    assert (image_hw, orientation) == ((5, 7), 8)
    assert b"eXIf" not in essentials
    assert b"iCCP" not in essentials
    with Image.open(io.BytesIO(essentials)) as image:
        assert image.size == (7, 5)
        image.load()


def test_every_cut_of_a_png_is_noticed():
    data = encoded("PNG", size=(30, 30))
    for keep in range(8, len(data)):
        with pytest.raises(ImageTruncatedError):
            png_essentials(data[:keep], "x", allow_truncated=False)


def test_a_flipped_bit_in_a_png_is_noticed():
    data = bytearray(encoded("PNG", size=(30, 30)))
    data[data.index(b"IDAT") + 8] ^= 4
    with pytest.raises(ImageTruncatedError, match="IDAT chunk fails its checksum"):
        png_essentials(bytes(data), "x", allow_truncated=False)


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": exif_block(1)}], ids=["VP8", "VP8L", "VP8X"])
def test_webp_canvas(options):
    assert webp_canvas_hw(encoded("WEBP", size=(321, 123), **options), "x") == (123, 321)


def test_gif_extent_counts_a_frame_that_overhangs():
    data = encoded("GIF", size=(9, 4))
    assert gif_extent_hw(data, "x") == (4, 9)
    frame = data.index(b",", 13)
    overhanging = data[: frame + 1] + struct.pack("<HHHH", 60_000, 1, 9, 4) + data[frame + 9 :]
    assert gif_extent_hw(overhanging, "x") == (5, 60_009)


@given(st.binary(max_size=300))
def test_only_image_errors_from_anything(tail):
    calls = [
        (b"\xff\xd8\xff", read_jpeg_header, {}),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", png_essentials, {"allow_truncated": False}),
        (b"GIF89a", gif_extent_hw, {}),
        (b"RIFF\0\0\0\0WEBP", webp_canvas_hw, {}),
        (b"", sniff, {}),
        (b"\0\0\0\x20ftyp", sniff, {}),
    ]
    for head, read, options in calls:
        with contextlib.suppress(ImageError):
            read(head + tail, "x", **options)
