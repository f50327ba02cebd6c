"""What DALI is given: the image alone; and the damage that it does not notice."""

from __future__ import annotations

import io
import struct
import subprocess
import sys

import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import ImageError, ImageTooLargeError, ImageTruncatedError
from visionfast.preprocess import reference
from visionfast.preprocess.dali_admission import Admission, admit, scan_damage
from visionfast.preprocess.decode import DecodeLimits, decode_image
from visionfast.preprocess.reference_decode import decode_reference
from visionfast.types import PreprocessSpec

SPEC = PreprocessSpec((64, 96))
LIMITS = DecodeLimits()


def blocks(image_hw=(40, 64), seed=0):
    """Coloured tiles: an image that shows when it is turned, and that JPEG hardly changes."""
    height, width = image_hw
    tiles = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return tiles.repeat(8, 0).repeat(8, 1)[:height, :width]


def encoded(image, kind="JPEG", **options):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, kind, **options)
    return stream.getvalue()


JPEG = encoded(blocks(), quality=95, subsampling=0)


def segment(marker, body):
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(body) + 2) + body


def exif(orientation, order="<", tag_type=3, count=1, offset=8):
    """An APP1 with one entry: the orientation."""
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", offset) + b"\0" * (offset - 8)
    value = struct.pack(order + {1: "B3x", 3: "H2x", 4: "I"}[tag_type], orientation)
    return segment(
        0xE1, b"Exif\0\0" + tiff + struct.pack(order + "HHHI", 1, 0x0112, tag_type, count) + value + b"\0" * 4
    )


def with_header(*segments):
    return JPEG[:2] + b"".join(segments) + JPEG[2:]


# Each is read otherwise by DALI than by everything else, or ends its process, where it is given the file as it is.
ODD_METADATA = {
    "two blocks, 90° then 180°": with_header(exif(6), exif(3)),
    "two blocks, upright then 180°": with_header(exif(1), exif(3)),
    "orientation as a byte": with_header(exif(6, tag_type=1)),
    "orientation twice": with_header(exif(6, count=2)),
    "no orientation": with_header(exif(6, count=0)),
    "as a big-endian long": with_header(exif(6, ">", tag_type=4)),
    "a broken block first": with_header(segment(0xE1, b"Exif\0\0junk"), exif(3)),
    "more entries than bytes": with_header(
        segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + struct.pack("<HHIH2x", 0x0112, 3, 1, 3))
    ),
    "an orientation of 9": with_header(exif(9)),
    "comment and XMP": with_header(
        segment(0xFE, b"\xff\xd8"), segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"), exif(8)
    ),
}


@pytest.mark.parametrize("data", ODD_METADATA.values(), ids=ODD_METADATA.keys())
def test_metadata_means_the_same_to_dali(data):
    pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")
    from visionfast.preprocess.dali import DaliPreprocessor, DaliRow

    with DaliPreprocessor(SPEC, batch=1) as preprocessor:
        (answer,) = preprocessor.run([data]).answers
        assert isinstance(answer, DaliRow)
        expected, letterbox = reference.letterbox(decode_image(data), SPEC)
        assert answer.letterbox == letterbox
        assert np.abs(np.from_dlpack(answer.run.tensor)[0].astype(int) - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_the_orientation_is_kept_and_nothing_else(orientation, order):
    data = with_header(
        segment(0xFE, b"a comment"), exif(orientation, order, offset=20), segment(0xE2, b"ICC_PROFILE\0")
    )
    admission = admit(data, limits=LIMITS, name="x")
    assert isinstance(admission, Admission)
    assert admission.image_hw == ((64, 40) if orientation >= 5 else (40, 64))
    np.testing.assert_array_equal(decode_reference(admission.encoded), decode_reference(data))
    assert len(admission.encoded) == len(JPEG) + (36 if orientation > 1 else 0)
    if orientation == 1:
        assert admission.encoded == JPEG


def test_a_png_goes_without_its_ancillary_chunks():
    from PIL import PngImagePlugin

    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "x" * 1000)
    data = encoded(blocks(), "PNG", pnginfo=text)
    admission = admit(data, limits=LIMITS, name="x")
    assert isinstance(admission, Admission)
    assert b"tEXt" in data
    assert b"tEXt" not in admission.encoded
    np.testing.assert_array_equal(decode_image(admission.encoded), blocks())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(np.zeros((4, 4, 4), np.uint8), "PNG"), "a PNG of 8 bits and colour type 6"),
        (encoded(blocks()[:, :, 0].astype(np.uint16), "PNG"), "a PNG of 16 bits and colour type 0"),
        (encoded(blocks(), "GIF"), "a GIF"),
        (encoded(blocks(), "BMP"), "a BMP"),
        (encoded(blocks(), "WebP"), "a WebP"),
        (JPEG[:-2], "a JPEG without its end marker"),
        (JPEG[:2] + b"\xff" + JPEG[2:], "a JPEG with something between"),
        (JPEG[:20] + b"ab" + JPEG[20:], "a JPEG with something between"),
        (JPEG[:2] + b"\xff\xd0" + JPEG[2:], "a JPEG with something between"),
    ],
)
def test_what_is_not_for_dali_says_why(data, reason):
    refused = admit(data, limits=LIMITS, name="x")
    assert isinstance(refused, str)
    assert refused.startswith(reason)


def test_cmyk_is_not_for_dali():
    stream = io.BytesIO()
    Image.fromarray(blocks()).convert("CMYK").save(stream, "JPEG")
    assert admit(stream.getvalue(), limits=LIMITS, name="x") == "a JPEG of 4 components, 8 bits each"


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_limits_hold_before_dali(kind):
    data = encoded(blocks(), kind)
    for limits in (DecodeLimits(max_pixels=40 * 64 - 1), DecodeLimits(max_bytes=len(data) - 1)):
        with pytest.raises(ImageTooLargeError, match=r"^x: expected at most"):
            admit(data, limits=limits, name="x")
    assert isinstance(admit(data, limits=DecodeLimits(max_pixels=40 * 64, max_bytes=len(data)), name="x"), Admission)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, len(JPEG) - 1), values=st.binary(min_size=0, max_size=8), cut=st.booleans())
@example(position=0, values=b"", cut=True)
@example(position=2, values=b"", cut=True)
@example(position=len(JPEG) - 1, values=b"\xff\xd9\0\0", cut=True)
def test_any_bytes_are_admitted_refused_or_an_image_error(position, values, cut):
    data = JPEG[:position] + values + (b"" if cut else JPEG[position + len(values) :])
    try:
        answer = admit(data, limits=LIMITS, name="x")
    except ImageError as error:
        answer = error.source
    assert isinstance(answer, Admission) or answer == "x" or answer.startswith("a ")


# ---- damage inside the scans -----------------------------------------------------------------------------------


def dropped(data, start, n):
    return data[:start] + data[start + n :]


def zeroed(data, start, n):
    return data[:start] + bytes(n) + data[start + n :]


def ended(data, start, n):
    return data[:start] + b"\xff\xd9"


def replaced(data, start, n):
    return data[:start] + np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8).tobytes() + data[start + n :]


NOISE = np.random.default_rng(0).integers(0, 256, (150, 201, 3), dtype=np.uint8)
SCANNED = {
    "baseline": encoded(NOISE),
    "restarts": encoded(NOISE, restart_marker_rows=1),
    "progressive": encoded(NOISE, progressive=True),
    "4:4:4": encoded(NOISE, subsampling=0),
    "grey": encoded(NOISE[:, :, 0]),
    "orientation": encoded(NOISE, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
}


@pytest.mark.parametrize("data", SCANNED.values(), ids=SCANNED.keys())
def test_an_intact_image_has_no_damage(data):
    assert scan_damage(data, limits=LIMITS, name="x") is None


@settings(max_examples=250, deadline=None)
@given(
    kind=st.sampled_from(sorted(SCANNED)),
    harm=st.sampled_from([dropped, zeroed, ended, replaced]),
    where=st.floats(0, 1),
    n=st.integers(1, 3000),
)
@example(kind="baseline", harm=ended, where=0.5, n=1)
@example(kind="baseline", harm=ended, where=1.0, n=1)
@example(kind="restarts", harm=dropped, where=0.5, n=1500)
@example(kind="progressive", harm=zeroed, where=0.9, n=2000)
def test_damage_is_found_exactly_where_the_definition_finds_it(kind, harm, where, n):
    data = SCANNED[kind]
    scan = data.index(b"\xff\xda") + 14
    data = harm(data, scan + int(where * (len(data) - 2 - scan)), n)
    try:
        decode_reference(data, name="x")
        expected = None
    except ImageError as error:
        expected = error
    found = scan_damage(data, limits=LIMITS, name="x")
    assert (type(found), str(found)) == (type(expected), str(expected))


def test_damage_is_no_damage_where_it_is_allowed():
    data = ended(SCANNED["baseline"], 2000, 0)
    assert isinstance(scan_damage(data, limits=LIMITS, name="x"), ImageTruncatedError)
    assert scan_damage(data, limits=DecodeLimits(allow_truncated=True), name="x") is None


def test_a_png_is_checked_by_its_checksums_when_it_is_admitted():
    data = encoded(NOISE, "PNG")
    assert scan_damage(data, limits=LIMITS, name="x") is None
    with pytest.raises(ImageTruncatedError, match="fails its checksum"):
        admit(replaced(data, len(data) // 2, 4), limits=LIMITS, name="x")


def test_the_check_lets_other_threads_run():
    """It runs beside the GPU's work, which this thread goes on to enqueue: it must not hold the interpreter's lock."""
    code = """
import sys, threading, time
import numpy as np, simplejpeg
data = simplejpeg.encode_jpeg(np.random.default_rng(0).integers(0, 256, (3000, 3000, 3), dtype=np.uint8))
from visionfast.preprocess.dali_admission import scan_damage
from visionfast.preprocess.limits import DecodeLimits
sys.setswitchinterval(1e-4)
checking = threading.Thread(target=scan_damage, args=(data,), kwargs={"limits": DecodeLimits(), "name": "x"})
checking.start()
steps = 0
while checking.is_alive():
    steps += 1
    time.sleep(0)
print(steps)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) > 20  # with the lock held it would be a handful


def test_the_check_reads_all_and_makes_an_eighth_of_the_picture(monkeypatch):
    """A whole decode would give the same answers at twice the cost, unnoticed."""
    decode, shapes = simplejpeg.decode_jpeg, []

    def noted(*arguments, **options):
        pixels = decode(*arguments, **options)
        shapes.append(pixels.shape)
        return pixels

    monkeypatch.setattr(simplejpeg, "decode_jpeg", noted)
    assert scan_damage(SCANNED["baseline"], limits=LIMITS, name="x") is None
    assert shapes == [(19, 26, 1)]  # of 150 × 201
