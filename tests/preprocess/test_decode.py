"""Every kind of input has one right answer or one clear error; the fast way equals the definition."""

from __future__ import annotations

import io
import os
import resource
import struct
import threading
import warnings
import zlib

import cv2
import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile, ImageOps

from visionfast.errors import (
    ImageError,
    ImageFormatError,
    ImageNotFoundError,
    ImageTooLargeError,
    ImageTruncatedError,
)
from visionfast.preprocess.decode import DecodeLimits, decode_image, decode_reference
from visionfast.preprocess.formats import read_jpeg_header

TRUNCATED_ALLOWED = DecodeLimits(allow_truncated=True)


def picture(height=37, width=53):
    """Smooth, with no symmetry that an orientation could hide behind. (H, W, 3) u8."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 255 // width, y * 255 // height, (3 * x + 5 * y) % 256], axis=2).astype(np.uint8)


def encode(image, kind, **options):
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def exif(orientation):
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


# --- the rule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP", "JPEG2000"])
def test_lossless_kinds(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(decode_image(encode(picture(), kind, **options)), picture())


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 1},
        {"subsampling": 2},
        {"progressive": True},
        {"quality": 1},
        {"keep_rgb": True},
        {"restart_marker_blocks": 2},
        {"comment": b"x" * 1000, "icc_profile": b"x" * 100_000},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("size", [(1, 1), (37, 53), (16, 16)])
def test_jpeg_equals_the_definition(options, size):
    data = encode(picture(*size), "JPEG", **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode_reference(data), expected)
    np.testing.assert_array_equal(decode_image(data), expected)


def test_photographs(photographs):
    for path in photographs:
        with Image.open(path) as image:
            expected = np.asarray(image)
        np.testing.assert_array_equal(decode_image(path), expected)
        np.testing.assert_array_equal(decode_image(path), cv2.imread(str(path))[:, :, ::-1])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation(kind, orientation):
    data = encode(picture(), kind, exif=exif(orientation))
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert expected.shape == ((37, 53, 3) if orientation < 5 else (53, 37, 3))
    for pixels in (decode_image(data), decode_reference(data)):
        np.testing.assert_array_equal(pixels, expected)
        assert pixels.flags.c_contiguous


def test_compressed_tiff_with_orientation():
    data = encode(picture(), "TIFF", compression="tiff_lzw", tiffinfo={0x0112: 6})
    np.testing.assert_array_equal(decode_image(data), np.rot90(picture(), -1))


def test_broken_exif_costs_nothing():
    data = encode(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    np.testing.assert_array_equal(decode_image(data), decode_image(encode(picture(), "JPEG")))
    np.testing.assert_array_equal(decode_reference(data), decode_image(data))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "PPM"])
def test_grey_is_replicated(kind):
    data = encode(picture()[:, :, 0], kind)
    with Image.open(io.BytesIO(data)) as image:
        grey = np.asarray(image.convert("L"))
    np.testing.assert_array_equal(decode_image(data), np.stack([grey] * 3, axis=2))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_one_bit_is_black_and_white(kind):
    bits = picture()[:, :, 0] > 99
    expected = np.stack([bits * np.uint8(255)] * 3, axis=2)
    np.testing.assert_array_equal(decode_image(encode(Image.fromarray(bits), kind)), expected)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
def test_palette(kind):
    image = Image.fromarray(picture()).quantize(17)
    np.testing.assert_array_equal(decode_image(encode(image, kind)), np.asarray(image.convert("RGB")))


def over_white(rgba):
    alpha = rgba[:, :, 3:] / 255
    return np.floor(rgba[:, :, :3] * alpha + 255 * (1 - alpha) + 0.5).astype(np.uint8)


@pytest.fixture
def rgba():
    alpha = np.linspace(0, 255, 37 * 53).astype(np.uint8).reshape(37, 53, 1)
    return np.concatenate([picture(), alpha], axis=2)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "JPEG2000", "array"])
def test_alpha_lies_over_white(kind, rgba):
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    pixels = decode_image(rgba if kind == "array" else encode(rgba, kind, **options))
    np.testing.assert_array_equal(pixels, over_white(rgba))
    assert pixels.flags.c_contiguous


def test_every_level_at_every_alpha_over_white():
    levels, alphas = np.mgrid[0:256, 0:256].astype(np.uint8)
    every = np.stack([levels, levels, levels, alphas], axis=2)
    np.testing.assert_array_equal(decode_image(every), over_white(every))


def test_grey_with_alpha_lies_over_white(rgba):
    grey_alpha = Image.fromarray(rgba).convert("LA")
    pixels = decode_image(encode(grey_alpha, "PNG"))
    np.testing.assert_array_equal(pixels, over_white(np.asarray(grey_alpha)[:, :, [0, 0, 0, 1]]))
    assert pixels.flags.c_contiguous


@pytest.mark.parametrize("transparency", [3, bytes([0, 128, 255, 7])], ids=["one index", "a table"])
def test_palette_with_transparency_lies_over_white(transparency):
    image = Image.fromarray(picture()).quantize(9)
    data = encode(image, "PNG", transparency=transparency)
    with Image.open(io.BytesIO(data)) as reopened:
        expected = over_white(np.asarray(reopened.convert("RGBA")))
    assert (expected == 255).all(axis=2).any()
    np.testing.assert_array_equal(decode_image(data), expected)


def test_gif_with_transparency_lies_over_white():
    data = encode(Image.fromarray(picture()).quantize(9), "GIF", transparency=2)
    with Image.open(io.BytesIO(data)) as reopened:
        expected = over_white(np.asarray(reopened.convert("RGBA")))
    assert (expected == 255).all(axis=2).any()
    np.testing.assert_array_equal(decode_image(data), expected)


def test_colour_keys_of_png():
    rgb = picture()
    key = tuple(int(level) for level in rgb[5, 6])
    pixels = decode_image(encode(rgb, "PNG", transparency=key))
    assert (pixels[5, 6] == 255).all()
    np.testing.assert_array_equal(pixels[(rgb != key).any(axis=2)], rgb[(rgb != key).any(axis=2)])

    grey = rgb[:, :, 0]
    pixels = decode_image(encode(grey, "PNG", transparency=int(grey[3, 40])))
    expected = np.where(grey == grey[3, 40], 255, grey)
    np.testing.assert_array_equal(pixels, np.stack([expected] * 3, axis=2))


@pytest.mark.parametrize(("bits", "scale"), [(1, 255), (2, 85), (4, 17)])
def test_shallow_grey_png_and_its_colour_key(bits, scale):
    """Keys are in the file's own units, where Pillow has scaled the pixels to 8 bits."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = np.arange(8) % (1 << bits)  # eight pixels
    packed = np.packbits(((row[:, None] >> np.arange(bits - 1, -1, -1)) & 1).astype(np.uint8).ravel()).tobytes()
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0))
    data += chunk(b"tRNS", struct.pack(">H", 1)) + chunk(b"IDAT", zlib.compress(b"\0" + packed)) + chunk(b"IEND", b"")
    expected = np.where(row == 1, 255, row * scale)
    assert decode_image(data)[0, :, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG2000", "PPM"])
def test_sixteen_bit_grey_keeps_the_high_byte(kind):
    deep = (np.arange(37 * 53).reshape(37, 53) * 33 % 65536).astype(np.uint16)
    assert (deep & 0xFF).any()
    expected = np.stack([(deep >> 8).astype(np.uint8)] * 3, axis=2)
    np.testing.assert_array_equal(decode_image(encode(Image.fromarray(deep), kind)), expected)


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
def test_sixteen_bit_colour_keeps_the_high_byte(suffix):
    deep = picture().astype(np.uint16) * 256 + 255
    _, data = cv2.imencode(suffix, deep[:, :, ::-1])
    np.testing.assert_array_equal(decode_image(data.tobytes()), picture())


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind):
    cmyk = np.concatenate([picture(), picture()[:, ::-1, :1] // 2], axis=2)
    image = Image.frombytes("CMYK", (53, 37), cmyk.tobytes())
    data = encode(image, kind)
    with Image.open(io.BytesIO(data)) as reopened:
        ink = np.asarray(reopened).astype(int)
    pixels = decode_image(data)
    by_hand = (255 - ink[:, :, :3]) * (255 - ink[:, :, 3:]) / 255
    assert np.abs(pixels - by_hand).max() <= 1


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_counts(kind):
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (decode_image(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("mode", ["F", "I"])
def test_float_and_32_bit_images_are_refused(mode):
    with pytest.raises(ImageFormatError, match=f"mode {mode}"):
        decode_image(encode(Image.new(mode, (5, 5)), "TIFF"))


# --- arrays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a[::-1],
        lambda a: a[:, ::-1],
        lambda a: a[..., ::-1],
        lambda a: a[::2, ::3],
        lambda a: a.transpose(1, 0, 2),
        lambda a: np.asfortranarray(a),
    ],
    ids=["as it is", "upside down", "mirrored", "BGR view", "strided", "transposed", "columns first"],
)
@pytest.mark.parametrize("channels", [0, 1, 3, 4])
def test_arrays(view, channels, rgba):
    array = rgba[:, :, 0] if channels == 0 else view(rgba[:, :, :channels])
    before = array.copy()
    before.flags.writeable = False
    pixels = decode_image(array)
    if channels in (0, 1):
        expected = np.stack([before.reshape(before.shape[:2])] * 3, axis=2)
    else:
        expected = over_white(before) if channels == 4 else before
    np.testing.assert_array_equal(pixels, expected)
    np.testing.assert_array_equal(array, before)
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(decode_image(before), expected)  # a read-only one too


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((5, 5, 3), np.float32),
        np.zeros((5, 5, 3), bool),
        np.zeros((5, 5, 3), np.uint16),
        np.zeros((3, 5, 5), np.uint8),
        np.zeros((5, 5, 2), np.uint8),
        np.zeros((1, 5, 5, 3), np.uint8),
        np.zeros(5, np.uint8),
        np.zeros((0, 5, 3), np.uint8),
        np.zeros((5, 0), np.uint8),
        np.array(None),
    ],
    ids=lambda array: f"{array.shape} {array.dtype}",
)
def test_other_arrays_are_refused(array):
    with pytest.raises(ImageFormatError, match=r"^array: expected a uint8 RGB array .*, got \(") as caught:
        decode_image(array)
    assert str(array.dtype) in str(caught.value)


def test_something_else_is_refused():
    with pytest.raises(ImageFormatError, match=r"^Image: expected a path, encoded bytes or a uint8 RGB array"):
        decode_image(Image.new("RGB", (5, 5)))  # type: ignore[arg-type]
    with pytest.raises(ImageFormatError, match=r"^third: .* got int"):
        decode_image(3, name="third")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: memoryview(data + data)[: len(data)]])
def test_kinds_of_bytes(wrap):
    data = encode(picture(), "PNG")
    np.testing.assert_array_equal(decode_image(wrap(data)), picture())


# --- files ------------------------------------------------------------------------------------------------------


def test_a_path_or_its_text(tmp_path):
    path = tmp_path / "ein Bild ü.png"
    path.write_bytes(encode(picture(), "PNG"))
    np.testing.assert_array_equal(decode_image(path), picture())
    np.testing.assert_array_equal(decode_image(str(path)), picture())


def test_files_that_are_none(tmp_path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("this is no picture\n")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    cases = [
        (tmp_path / "missing.jpg", ImageNotFoundError, "no such file"),
        (tmp_path, ImageNotFoundError, "a directory"),
        (tmp_path / "empty.jpg", ImageFormatError, "an empty file"),
        (tmp_path / "text.jpg", ImageFormatError, "begin with b'this is '"),
        (tmp_path / "pipe.jpg", ImageNotFoundError, "a pipe, socket or device"),
        ("/dev/zero", ImageNotFoundError, "a pipe, socket or device"),
        (tmp_path / "loop.jpg", ImageNotFoundError, "cannot be read"),
        (tmp_path / "text.jpg" / "inside.jpg", ImageNotFoundError, "cannot be read: Not a directory"),
        (tmp_path / ("long" * 100), ImageNotFoundError, "cannot be read: File name too long"),
        ("zero\0byte.jpg", ImageNotFoundError, "cannot be read"),
        ("", ImageNotFoundError, "got an empty one"),
    ]
    for source, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            decode_image(source)
        assert caught.value.source == (os.fspath(source) or "path")
        assert "\n" not in caught.value.reason


def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "secret.png"
    path.write_bytes(encode(picture(), "PNG"))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may read everything")
    with pytest.raises(ImageNotFoundError, match="check its permissions"):
        decode_image(path)


def test_a_file_over_the_limit_is_not_read(tmp_path):
    path = tmp_path / "huge.jpg"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte could not be read here
    with pytest.raises(ImageTooLargeError, match=r"at most 268435456 bytes, got 1099511627776"):
        decode_image(path)
    with pytest.raises(ImageTooLargeError, match="at most 100 bytes"):
        decode_image(encode(picture(), "PNG"), limits=DecodeLimits(max_bytes=100))


def test_the_name_in_the_error():
    with pytest.raises(ImageError) as caught:
        decode_image(b"no", name="upload 7")
    assert caught.value.source == "upload 7"
    with pytest.raises(ImageError) as caught:
        decode_image(b"no")
    assert caught.value.source == "bytes"


# --- claims -----------------------------------------------------------------------------------------------------


def claiming(kind, width, height):
    """A small file whose header claims other sides."""
    data = bytearray(encode(picture(), kind, **({"lossless": True} if kind == "WEBP" else {})))
    if kind == "JPEG":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    elif kind == "PNG":
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    elif kind == "GIF":
        data[6:10] = struct.pack("<HH", width, height)
    elif kind == "BMP":
        data[18:26] = struct.pack("<ii", width, height)
    elif kind == "PPM":
        data = bytearray(b"P6 %d %d 255\n" % (width, height)) + data[-100:]
    elif kind == "WEBP":
        canvas = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
        vp8x = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + canvas
        body = b"WEBP" + vp8x + bytes(data[12:])
        data = bytearray(b"RIFF" + struct.pack("<I", len(body)) + body)
    elif kind == "TIFF":
        order = "<"
        (directory,) = struct.unpack_from(order + "I", data, 4)
        (entries,) = struct.unpack_from(order + "H", data, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag = struct.unpack_from(order + "H", data, entry)[0]
            if tag in (0x0100, 0x0101):
                struct.pack_into(order + "HII", data, entry + 2, 4, 1, width if tag == 0x0100 else height)
    elif kind == "JPEG2000":
        for marker in (b"ihdr", b"\xff\x51"):
            at = data.index(marker) + (4 if marker == b"ihdr" else 6)
            sides = (height, width) if marker == b"ihdr" else (width, height)
            data[at : at + 8] = struct.pack(">II", *sides)
    return bytes(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "PPM", "WEBP", "TIFF", "JPEG2000"])
@pytest.mark.parametrize("unlimited_pillow", [False, True])
def test_60000_by_60000_is_refused_from_the_header(kind, unlimited_pillow, monkeypatch):
    """Also where somebody, ultralytics for one, has switched Pillow's own limit off."""
    if unlimited_pillow:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageTooLargeError, match="60000×60000 = 3600000000"):
        decode_image(claiming(kind, 60_000, 60_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF"])
def test_the_limit_is_inclusive(kind):
    data = encode(picture(), kind)
    assert decode_image(data, limits=DecodeLimits(max_pixels=37 * 53)).shape == (37, 53, 3)
    with pytest.raises(ImageTooLargeError, match="at most 1960 pixels, got 53×37 = 1961"):
        decode_image(data, limits=DecodeLimits(max_pixels=37 * 53 - 1))
    with pytest.raises(ImageTooLargeError, match="at most 1960 pixels"):
        decode_image(picture(), limits=DecodeLimits(max_pixels=37 * 53 - 1))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "JPEG"])
def test_a_picture_of_nothing_is_refused(kind):
    with pytest.raises(ImageError):
        decode_image(claiming(kind, 0, 5))


def test_pillows_global_state_is_left_alone_and_nothing_warns():
    state = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    for kind in ("GIF", "TIFF", "PNG"):
        with pytest.raises(ImageTooLargeError):
            decode_image(claiming(kind, 60_000, 60_000))
    decode_image(encode(picture(), "JPEG")[:-100], limits=TRUNCATED_ALLOWED)
    assert state == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))


def test_a_zlib_bomb_in_a_text_chunk_is_not_inflated():
    body = b"Comment\0\0" + zlib.compress(bytes(300_000_000), 9)
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    data = encode(picture(), "PNG")
    np.testing.assert_array_equal(decode_image(data[:33] + chunk + data[33:]), picture())


# --- truncated and damaged --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.99, "end marker"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_truncated(kind, part):
    data = encode(picture(200, 300), kind)
    if part == "end marker":
        if kind in ("GIF", "JPEG2000"):
            pytest.skip("the pixels are whole without it")
        data = data[:-2]
    else:
        data = data[: int(len(data) * part)]
    with pytest.raises((ImageTruncatedError, ImageFormatError)) as caught:
        decode_image(data)
    if kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        assert isinstance(caught.value, ImageTruncatedError)


@pytest.mark.parametrize("progressive", [False, True])
def test_truncated_jpeg_allowed(progressive):
    whole = encode(picture(200, 300), "JPEG", progressive=progressive)
    data = whole[: len(whole) // 2]
    pixels = decode_image(data, limits=TRUNCATED_ALLOWED)
    np.testing.assert_array_equal(pixels, decode_reference(data, limits=TRUNCATED_ALLOWED))
    assert pixels.shape == (200, 300, 3)
    if not progressive:
        np.testing.assert_array_equal(pixels[:40], decode_image(whole)[:40])
        assert np.ptp(pixels[-8:].astype(int), axis=(0, 1)).max() < 3  # one colour: nothing was there


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "GIF"])
def test_truncated_others_allowed(kind):
    image = Image.fromarray(picture(200, 300))
    image = image.quantize(64) if kind == "GIF" else image
    whole = encode(image, kind)
    pixels = decode_image(whole[: len(whole) // 2], limits=TRUNCATED_ALLOWED)
    right = (pixels == decode_image(whole)).all(axis=(1, 2))
    assert 0.2 < right.mean() < 0.9


def test_nothing_left_to_decode_is_an_error_even_when_allowed():
    for kind in ("JPEG", "PNG", "WEBP", "GIF"):
        with pytest.raises(ImageError):
            decode_image(encode(picture(), kind)[:20], limits=TRUNCATED_ALLOWED)


def test_damage_inside_a_jpeg_is_noticed():
    data = bytearray(encode(picture(200, 300), "JPEG", quality=95))
    middle = len(data) // 2
    data[middle : middle + 2] = b"\xff\xd9"
    words = r"a whole file is needed, unless truncated images are allowed \(--allow-truncated, "
    with pytest.raises(ImageTruncatedError, match=words):
        decode_image(bytes(data))


def test_padding_before_the_end_marker_is_no_damage():
    """Webcams write it; libjpeg warns of it, and the pixels are whole."""
    data = encode(picture(), "JPEG")
    padded = data[:-2] + bytes(50) + data[-2:]
    with pytest.raises(ValueError, match="extraneous bytes"):
        simplejpeg.decode_jpeg(padded, "RGB", strict=True)
    np.testing.assert_array_equal(decode_image(padded), decode_image(data))


def test_what_follows_the_end_marker_does_not_matter():
    data = encode(picture(), "JPEG")
    np.testing.assert_array_equal(decode_image(data + data + b"trailer"), decode_image(data))


def test_twelve_bit_jpeg_is_refused():
    data = bytearray(encode(picture(), "JPEG"))
    data[data.index(b"\xff\xc0") + 4] = 12
    with pytest.raises(ImageFormatError, match="8-bit JPEG, got 12 bits"):
        decode_image(bytes(data))
    assert not read_jpeg_header(bytes(data), "x").ordinary


def test_threads_decode_the_same():
    sources = [encode(picture(), kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP")]
    expected = [decode_image(source) for source in sources]
    wrong = []

    def work():
        for _ in range(20):
            for source, pixels in zip(sources, expected, strict=True):
                if not np.array_equal(decode_image(source), pixels):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
