"""Bytes from anywhere: an image or an `ImageError` comes back, nothing else, and nothing is printed."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import ImageError
from visionfast.preprocess.decode import DecodeLimits, decode_image, decode_reference

# The limit keeps a mutated header from asking for much; what is asked for is then really decoded.
STRICT = DecodeLimits(max_pixels=1_000_000)
LENIENT = DecodeLimits(max_pixels=1_000_000, allow_truncated=True)


def seeds():
    y, x = np.mgrid[0:24, 0:40]
    rgb = Image.fromarray(np.stack([x * 6, y * 10, x * y % 256], axis=2).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    variants = {
        "jpeg": (rgb, "JPEG", {"exif": exif.tobytes()}),
        "progressive": (rgb, "JPEG", {"progressive": True}),
        "grey jpeg": (rgb.convert("L"), "JPEG", {}),
        "cmyk jpeg": (rgb.convert("CMYK"), "JPEG", {}),
        "png": (rgb, "PNG", {"exif": exif.tobytes()}),
        "palette png": (rgb.quantize(9), "PNG", {"transparency": 3}),
        "webp": (rgb, "WEBP", {}),
        "lossless webp": (rgb.convert("RGBA"), "WEBP", {"lossless": True, "exif": exif.tobytes()}),
        "gif": (rgb.quantize(9), "GIF", {}),
        "bmp": (rgb, "BMP", {}),
        "rle bmp": (rgb.quantize(9), "BMP", {}),
        "tiff": (rgb, "TIFF", {}),
        "lzw tiff": (rgb, "TIFF", {"compression": "tiff_lzw"}),
        "jpeg tiff": (rgb, "TIFF", {"compression": "jpeg"}),
        "fax tiff": (rgb.convert("1"), "TIFF", {"compression": "group4"}),
        "ppm": (rgb, "PPM", {}),
        "jp2": (rgb, "JPEG2000", {}),
        "avif": (rgb, "AVIF", {}),
    }
    files = {}
    for name, (image, kind, options) in variants.items():
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        files[name] = stream.getvalue()
    return files


SEEDS = seeds()


def outcome(decode, data, limits):
    try:
        pixels = decode(data, limits=limits)
    except ImageError as error:
        assert str(error).isprintable(), str(error)  # noqa: PT017 (one of two right outcomes)
        return type(error)
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert pixels.flags.c_contiguous
    return pixels


def check(data):
    """The fast way and the definition come to the same, strict or lenient; lenient never refuses more."""
    for limits in (STRICT, LENIENT):
        fast, reference = outcome(decode_image, data, limits), outcome(decode_reference, data, limits)
        if isinstance(fast, np.ndarray):
            np.testing.assert_array_equal(fast, reference)
        else:
            assert fast is reference


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes(data):
    check(data)


@settings(max_examples=150, deadline=None)
@given(
    head=st.sampled_from([seed[:size] for seed in SEEDS.values() for size in (4, 12, 30)]),
    tail=st.binary(max_size=400),
)
def test_random_bytes_behind_a_true_signature(head, tail):
    check(head + tail)


mutation = st.tuples(
    st.floats(0, 1, exclude_max=True), st.one_of(st.sampled_from([0, 1, 127, 128, 254, 255]), st.integers(0, 255))
)


@pytest.mark.parametrize("name", SEEDS)
@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(mutation, max_size=6),
    keep=st.one_of(st.just(1.0), st.floats(0, 1)),
    insert=st.one_of(st.just(b""), st.binary(max_size=20)),
    where=st.floats(0, 1),
)
def test_mutated_files(name, changes, keep, insert, where):
    data = bytearray(SEEDS[name])
    for position, value in changes:
        data[int(position * len(data))] = value
    cut = int(where * len(data))
    data[cut:cut] = insert
    check(bytes(data[: int(keep * len(data))]))


@pytest.mark.parametrize("name", [name for name in SEEDS if "tiff" not in name])
def test_nothing_is_printed(name, capfd):
    """Not by Python and not by a C library behind it. (libtiff does print; its handler is the process's.)"""
    random = np.random.default_rng(7)
    for _ in range(60):
        data = bytearray(SEEDS[name])
        for position in random.integers(0, len(data), 4):
            data[position] = random.integers(0, 256)
        check(bytes(data))
        check(bytes(data[: random.integers(0, len(data))]))
    assert capfd.readouterr() == ("", "")
