"""What DALI gets beside strangers' images, through the graph that is deployed, on DALI's CPU operators."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import ImageError, ImageTooLargeError, ImageTruncatedError
from visionfast.preprocess import reference
from visionfast.preprocess.dali_feed import PLACEHOLDER, DaliFeed, feed_of, packed, ticket_of
from visionfast.preprocess.dali_graph import input_pipeline
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.limits import DecodeLimits
from visionfast.types import PreprocessSpec

pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")

SPEC = PreprocessSpec((96, 160))
LIMITS = DecodeLimits()


def tiles(image_hw: tuple[int, int], seed: int = 0) -> npt.NDArray[np.uint8]:
    """Coloured tiles: they show when they are turned, and JPEG hardly changes them."""
    height, width = image_hw
    small = np.random.default_rng(seed).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return small.repeat(8, 0).repeat(8, 1)[:height, :width]


def encoded(image: npt.NDArray[np.uint8] | Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def exif(orientation: int) -> bytes:
    tiff = b"II*\0" + struct.pack("<IHHHIHxxI", 8, 1, 0x0112, 3, 1, orientation, 0)
    body = b"Exif\0\0" + tiff
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


def fed(data: bytes, limits: DecodeLimits = LIMITS, spec: PreprocessSpec = SPEC) -> DaliFeed:
    return feed_of(data, spec, limits=limits, name="bytes")


@functools.cache
def graph(size_hw: tuple[int, int] = SPEC.size_hw) -> Any:
    import nvidia.dali as dali

    made = input_pipeline(PreprocessSpec(size_hw), batch=8, dtype="uint8", with_trailer=True)
    revived = dali.Pipeline.deserialize(made.serialize(), prefetch_queue_depth=1)
    revived.build()
    return revived


def run(feeds: Sequence[DaliFeed], size_hw: tuple[int, int] = SPEC.size_hw) -> npt.NDArray[np.uint8]:
    """(B, h, w, 3) u8; what comes out beside it is what the tickets say."""
    tickets = np.stack([ticket_of(feed, 77 + i) for i, feed in enumerate(feeds)])
    rows = packed(feeds, tickets)
    assert rows.dtype == np.uint8
    graph(size_hw).feed_input("encoded", list(rows))
    images, decoded_hw, told = (output.as_array() for output in graph(size_hw).run())
    np.testing.assert_array_equal(told, tickets[:, :5])
    np.testing.assert_array_equal(decoded_hw, tickets[:, 5:])
    made: npt.NDArray[np.uint8] = images
    return made


def definition(data: bytes, limits: DecodeLimits = LIMITS, spec: PreprocessSpec = SPEC) -> npt.NDArray[np.uint8]:
    return reference.letterbox(decode_image(data, limits=limits), spec)[0]


JPEG = encoded(tiles((40, 64)), quality=95, subsampling=0)
CUT = len(JPEG) - 100  # within its scan

BY_DALI = (
    {
        "jpeg": JPEG,
        "progressive": encoded(tiles((40, 64)), quality=95, progressive=True),
        "grey": encoded(Image.fromarray(tiles((40, 64))).convert("L")),
        "one pixel": encoded(tiles((1, 1))),
        "a line": encoded(tiles((1, 900))),
        "zeros behind it": JPEG + bytes(100),
        "two orientations": JPEG[:2] + exif(6) + exif(3) + JPEG[2:],  # as it is, it ends DALI's process
        "an orientation that is none": JPEG[:2] + exif(9) + JPEG[2:],
    }
    | {f"orientation {turn}": JPEG[:2] + exif(turn) + JPEG[2:] for turn in range(1, 9)}
)

BY_CPU = {
    "png": encoded(tiles((40, 64)), "PNG"),
    "png of one pixel": encoded(tiles((1, 1)), "PNG"),
    "a tall png": encoded(tiles((900, 2)), "PNG"),
    "16 bits": encoded(Image.fromarray(np.arange(2560, dtype=np.uint16).reshape(40, 64) * 25), "PNG"),
    "alpha": encoded(Image.fromarray(tiles((40, 64))).convert("RGBA"), "PNG"),
    "palette": encoded(Image.fromarray(tiles((40, 64))).convert("P"), "PNG"),
    "cmyk": encoded(Image.fromarray(tiles((40, 64))).convert("CMYK")),
    "webp": encoded(tiles((40, 64)), "WebP", lossless=True),
    "gif": encoded(tiles((40, 64)), "GIF"),
    "bmp": encoded(tiles((40, 64)), "BMP"),
    "ppm": encoded(tiles((40, 64)), "PPM"),
    "bytes between segments": JPEG[:2] + b"\xff" + JPEG[2:],
}


@pytest.mark.parametrize("name", BY_DALI)
def test_an_ordinary_jpeg_is_decoded_by_dali(name: str) -> None:
    feed = fed(BY_DALI[name])
    assert feed.encoded.startswith(b"\xff\xd8")
    assert feed.image_hw == decode_image(BY_DALI[name]).shape[:2]
    assert np.abs(run([feed])[0].astype(int) - definition(BY_DALI[name])).max() <= 1


@pytest.mark.parametrize("name", BY_CPU)
def test_what_dali_decodes_by_other_rules_is_handed_over_as_pixels_to_the_bit(name: str) -> None:
    feed = fed(BY_CPU[name])
    assert feed.encoded.startswith(b"P6")
    assert len(feed.encoded) < 3 * 96 * 160 + 20
    assert feed.image_hw == decode_image(BY_CPU[name]).shape[:2]
    np.testing.assert_array_equal(run([feed])[0], definition(BY_CPU[name]))


def test_photographs_are_the_definition_within_one_level(photographs: list[Path]) -> None:
    size_hw = (640, 640)
    spec = PreprocessSpec(size_hw)
    files = [path.read_bytes() for path in photographs]
    feeds = [fed(data, spec=spec) for data in files]
    images = run([feeds[0], PLACEHOLDER, feeds[1]], size_hw)
    for image, data in zip(images[[0, 2]], files, strict=True):
        difference = np.abs(image.astype(int) - definition(data, spec=spec))
        assert difference.max() <= 2
        assert difference.mean() < 0.1
    turned = [data[:2] + exif(turn) + data[2:] for data, turn in zip(files, (6, 3), strict=True)]
    for image, data in zip(run([fed(data, spec=spec) for data in turned], size_hw), turned, strict=True):
        assert np.abs(image.astype(int) - definition(data, spec=spec)).mean() < 0.1


def test_in_one_run_every_image_stays_on_its_own_feet() -> None:
    names = ["jpeg", "orientation 6", "grey", "one pixel"]
    files = [BY_DALI[name] for name in names] + [BY_CPU["png"], BY_CPU["alpha"]]
    feeds = [PLACEHOLDER, *map(fed, files), PLACEHOLDER]
    images = run(feeds)
    for image, data in zip(images[1:-1], files, strict=True):
        assert np.abs(image.astype(int) - definition(data)).max() <= 1
    for placeholder in images[[0, -1]]:
        assert (placeholder[1:, 1:] == SPEC.pad_value).all()


@settings(max_examples=60, deadline=None)
@given(
    image_hw=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["JPEG", "PNG"]),
    size_hw=st.sampled_from([(96, 160), (33, 31)]),
)
@example(image_hw=(1, 300), seed=0, kind="JPEG", size_hw=(33, 31))
@example(image_hw=(300, 1), seed=0, kind="PNG", size_hw=(33, 31))
@example(image_hw=(96, 160), seed=0, kind="PNG", size_hw=(96, 160))
def test_any_size_is_the_definition(image_hw: tuple[int, int], seed: int, kind: str, size_hw: tuple[int, int]) -> None:
    spec = PreprocessSpec(size_hw)
    data = encoded(tiles(image_hw, seed), kind)
    difference = np.abs(run([fed(data, spec=spec)], size_hw)[0].astype(int) - definition(data, spec=spec))
    assert difference.max() <= (1 if kind == "JPEG" else 0)


# ---- what must not reach DALI -------------------------------------------------------------------------------------


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(content: bytes) -> bytes:
    """8 × 8, RGB; every checksum is right, whatever the content."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        JPEG[:200],
        JPEG[:CUT],
        JPEG[:CUT] + b"\xff\xd9",  # it has its end
        JPEG.replace(b"\xff\xda", b"\xff\xd9", 1),
        png_of(b"not deflated"),
        png_of(zlib.compress(bytes(10))),
    ],
)
def test_what_cannot_be_decoded_is_the_definition_s_error(data: bytes) -> None:
    with pytest.raises(ImageError) as expected:
        decode_image(data, name="bytes")
    with pytest.raises(type(expected.value)) as got:
        fed(data)
    assert str(got.value) == str(expected.value)


@settings(max_examples=150, deadline=None)
@given(place=st.integers(2, len(JPEG) - 3), value=st.integers(0, 255))
def test_a_damaged_jpeg_is_decoded_by_dali_as_by_the_definition_or_not_at_all(place: int, value: int) -> None:
    data = JPEG[:place] + bytes([value]) + JPEG[place + 1 :]
    try:
        feed = fed(data)
    except ImageError:
        return
    assert np.abs(run([feed])[0].astype(int) - definition(data)).max() <= 1


def test_where_damage_is_allowed_the_cpu_decodes_it() -> None:
    allowed = DecodeLimits(allow_truncated=True)
    for data in (JPEG[:CUT], JPEG[:CUT] + b"\xff\xd9"):
        feed = fed(data, allowed)
        assert feed.encoded.startswith(b"P6")
        np.testing.assert_array_equal(run([feed])[0], definition(data, allowed))


def test_limits_hold() -> None:
    with pytest.raises(ImageTooLargeError):
        fed(JPEG, DecodeLimits(max_pixels=40 * 64 - 1))
    with pytest.raises(ImageTooLargeError):
        fed(JPEG, DecodeLimits(max_bytes=len(JPEG) - 1))
    with pytest.raises(ImageTruncatedError):
        fed(JPEG[:-2])
    assert simplejpeg.decode_jpeg(fed(JPEG).encoded).shape == (40, 64, 3)
