"""The corpus of odd images: each file by name, with its pixels or its error."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from visionfast.errors import ImageError, ImageFormatError, ImageTooLargeError, ImageTruncatedError
from visionfast.preprocess.decode import DecodeLimits, decode_image, decode_reference


def as_pillow_does(data):
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
            rgba = np.asarray(upright.convert("RGBA")).astype(float)
            alpha = rgba[:, :, 3:] / 255
            return np.floor(rgba[:, :, :3] * alpha + 255 * (1 - alpha) + 0.5)
        return np.asarray(upright.convert("RGB"))


@pytest.mark.parametrize(
    ("file", "hw"),
    [
        ("apng_mode_16bit.png", (64, 128)),
        ("apng_mode_palette_1bit_alpha.png", (64, 128)),
        ("avif_hopper.avif", (128, 128)),
        ("exif_gps_typeerror.jpg", (531, 800)),
        ("flower.webp", (360, 480)),
        ("hopper_16bit_qtables.jpg", (128, 128)),
        *((f"hopper_orientation_{orientation}.jpg", (128, 128)) for orientation in range(2, 9)),
        ("icc_profile_big.jpg", (250, 425)),
        ("pil_sample_cmyk.jpg", (100, 100)),
        ("tRNS_null_1x1.png", (1, 1)),
        ("transparent.webp", (150, 200)),
        ("uncompressed_la.png", (128, 128)),
    ],
)
@pytest.mark.filterwarnings("ignore:Truncated File Read:UserWarning")  # Pillow's word for broken EXIF
def test_pixels(shared_data, file, hw):
    data = (shared_data / "odd-images" / file).read_bytes()
    expected = as_pillow_does(data)
    for pixels in (decode_image(data), decode_reference(data)):
        assert pixels.shape == (*hw, 3)
        np.testing.assert_array_equal(pixels, expected)


def test_the_orientations_are_of_one_picture(shared_data):
    """Each file was saved by itself, so upright they agree but for JPEG noise."""
    upright = [
        decode_image(shared_data / "odd-images" / f"hopper_orientation_{orientation}.jpg").astype(float)
        for orientation in range(2, 9)
    ]
    assert max(np.abs(pixels - upright[0]).mean() for pixels in upright) < 6


def test_sixteen_bit_grey_with_a_colour_key(shared_data):
    data = (shared_data / "odd-images" / "i_trns.png").read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        deep, key = np.asarray(image), image.info["transparency"]
    expected = np.where(deep == key, 255, deep >> 8)
    np.testing.assert_array_equal(decode_image(data), np.stack([expected] * 3, axis=2))


@pytest.mark.parametrize(
    ("file", "error", "reason"),
    [
        ("broken.png", ImageFormatError, "the PNG is damaged; a whole file is needed"),
        ("decompression_bomb.gif", ImageTooLargeError, "65535×66601 = 4364696535"),
        ("monkey12.jpg", ImageFormatError, "8-bit JPEG, got 12 bits"),
        ("truncated_jpeg.jpg", ImageTruncatedError, "Premature end of JPEG file"),
    ],
)
def test_errors(shared_data, file, error, reason):
    path = shared_data / "odd-images" / file
    with pytest.raises(error, match=reason) as caught:
        decode_image(path, name=file)
    assert caught.value.source == file
    assert "\n" not in str(caught.value)


def test_the_truncated_one_when_allowed(shared_data):
    path = shared_data / "odd-images" / "truncated_jpeg.jpg"
    assert decode_image(path, limits=DecodeLimits(allow_truncated=True)).shape == (100, 100, 3)


def test_no_file_of_the_corpus_is_forgotten(shared_data):
    """A new file has to be given an outcome above."""
    answered = refused = 0
    for path in sorted((shared_data / "odd-images").iterdir()):
        try:
            decode_image(path)
            answered += 1
        except ImageError:
            refused += 1
    assert (answered, refused) == (19, 4)
