"""What systems are asked about: images as traffic has them, from thumbnails to 4K, JPEG beside PNG, empty and crowded.

They come from a folder, as they are, or are made of the two photographs that engines are certified on. The same
arguments give the same bytes, as long as the encoder's release is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from visionfast.bench.records import Input
from visionfast.errors import ImageError, OptionError
from visionfast.image_files import image_files, shown_name
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.formats import sniff
from visionfast.terminal import one_line

__all__ = ["MOST", "distinct", "folder_mix", "found_again", "input_of", "made_mix"]

MOST = 12
"""Images of a mix: each of them has to come often enough for a percentile of its own."""

_FORMATS = {"JPEG": "jpeg", "PNG": "png"}
_PNG_HEADER = 8 + 25  # its signature and IHDR, which is the first chunk of every PNG

_Pixels = npt.NDArray[np.uint8]


def input_of(name: str, encoded: bytes) -> Input:
    """An encoded image with what the record says of it.

    Raises:
        ImageError: it is no image, or a damaged one.
    """
    kind = sniff(encoded, name)
    height, width = decode_image(encoded, name=name).shape[:2]
    digest = hashlib.sha256(encoded).hexdigest()
    return Input(name, encoded, digest, (height, width), _FORMATS.get(kind, kind.lower()), len(encoded))


def folder_mix(folder: Path, *, seed: int = 0, most: int = MOST) -> tuple[tuple[Input, ...], tuple[str, ...]]:
    """Images of a folder and of those below it, as they are; a random sample where there are more than `most`.

    Returns:
        the images, and the names of those that were drawn and left out because they cannot be read, or are neither
        JPEG nor PNG.

    Raises:
        OptionError: it is no folder, or no image in it can be used.
    """
    files = sorted(image_files(folder))
    random.Random(seed).shuffle(files)
    found: list[Input] = []
    left_out: list[str] = []
    for file in files:
        if len(found) == most:
            break
        name = shown_name(file.path)
        try:
            made = input_of(name, (folder / Path(file.path.decode(errors="surrogateescape"))).read_bytes())
        except (ImageError, OSError):
            left_out.append(name)
            continue
        if made.format in _FORMATS.values():
            found.append(made)
        else:
            left_out.append(name)
    if not found:
        raise OptionError(f"{folder}: expected a folder with JPEG or PNG images, found none that can be read")
    return tuple(found), tuple(left_out)


def found_again(folder: Path, wanted: Sequence[Input]) -> tuple[Input, ...]:
    """The images of an earlier run, by their bytes, whatever they are called now and whatever else is there.

    Args:
        folder: that they are in, or below.
        wanted: of that run's record; their own bytes are not needed.

    Raises:
        OptionError: it is no folder, or one of them is not in it.
    """
    sizes = {image.n_bytes for image in wanted}
    here: dict[str, Input] = {}
    for file in image_files(folder):
        if file.n_bytes not in sizes:
            continue
        with contextlib.suppress(ImageError, OSError):
            encoded = (folder / os.fsdecode(file.path)).read_bytes()
            if hashlib.sha256(encoded).hexdigest() in {image.sha256 for image in wanted} - here.keys():
                made = input_of(shown_name(file.path), encoded)
                here[made.sha256] = made
    for image in wanted:
        if image.sha256 not in here:
            raise OptionError(
                f"baseline: it was measured on other images: {one_line(image.name)} ({image.n_bytes} bytes, sha256 "
                f"{image.sha256[:12]}) is not in {folder}; name the folder that has them, or measure it again"
            )
    return tuple(here[image.sha256] for image in wanted)


def made_mix(photographs: Sequence[Path] | None = None, *, most: int = MOST) -> tuple[Input, ...]:
    """The mix of two photographs: the usual sizes first, so that a slow system that sees few of them sees those.

    Args:
        photographs: to make it of; default: the two that engines are certified on.
        most: images at most.

    Raises:
        ImageError: a photograph cannot be read.
        CertificateError: none are given, and the default ones are not installed.
    """
    if photographs is None:
        from visionfast.certify import default_images

        photographs = default_images()
    files = [path.read_bytes() for path in photographs]
    pixels = [decode_image(encoded, name=path.name) for encoded, path in zip(files, photographs, strict=True)]
    first, last = pixels[0], pixels[-1]
    originals = [(path.name, encoded) for path, encoded in zip(photographs, files, strict=True)]
    makers: list[tuple[str, Callable[[], bytes]]] = [
        ("1920×1080", lambda: _jpeg(_fitted(last, (1080, 1920)))),
        ("thumbnail 160×120", lambda: _jpeg(_fitted(first, (120, 160)))),
        ("640×480, PNG", lambda: _png(_fitted(first, (480, 640)))),
        ("3840×2160", lambda: _jpeg(_fitted(last, (2160, 3840)))),
        ("empty 1280×720", lambda: _jpeg(_empty(last, (720, 1280)))),
        ("crowd 1920×1080, 6 pictures", lambda: _jpeg(_tiled(pixels, (2, 3), (1080, 1920)))),
        ("strip 2048×256", lambda: _jpeg(_fitted(last, (256, 2048)))),
        # At 640 pixels YOLOv8n still finds 200 people here; in smaller pictures it finds fewer.
        ("crowd 2560×2560, 48 pictures", lambda: _jpeg(_tiled(pixels[:1], (6, 8), (2560, 2560)))),
        ("1920×1080, PNG", lambda: _png(_fitted(last, (1080, 1920)))),
        ("320×240", lambda: _jpeg(_fitted(first, (240, 320)))),
    ]
    made = [*originals, *((name, make()) for name, make in makers[: max(0, most - len(originals))])]
    return tuple(input_of(name, encoded) for name, encoded in made[:most])


def distinct(encoded: bytes, number: int) -> bytes:
    """The same picture in other bytes for every `number`: a comment is put in, which no decoder looks at.

    What keeps answers by the image's bytes has never seen it.

    Raises:
        OptionError: it is neither a JPEG nor a PNG.
    """
    text = b"bench\0" + str(number).encode()
    if encoded[:2] == b"\xff\xd8":
        return encoded[:2] + b"\xff\xfe" + struct.pack(">H", len(text) + 2) + text + encoded[2:]
    if encoded[:8] == b"\x89PNG\r\n\x1a\n":
        chunk = b"tEXt" + text
        comment = struct.pack(">I", len(text)) + chunk + struct.pack(">I", zlib.crc32(chunk))
        return encoded[:_PNG_HEADER] + comment + encoded[_PNG_HEADER:]
    raise OptionError(f"distinct: expected a JPEG or a PNG, got {len(encoded)} bytes of something else")


# ---- pictures ---------------------------------------------------------------------------------------------


def _fitted(pixels: _Pixels, size_hw: tuple[int, int]) -> _Pixels:
    """The largest middle part of that shape, scaled to it."""
    (height, width), (h, w) = pixels.shape[:2], size_hw
    scale = min(height / h, width / w)
    cut_h, cut_w = max(1, round(h * scale)), max(1, round(w * scale))
    top, left = (height - cut_h) // 2, (width - cut_w) // 2
    middle = pixels[top : top + cut_h, left : left + cut_w]
    how = cv2.INTER_AREA if scale > 1 else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(middle, (w, h), interpolation=how), np.uint8)


def _empty(pixels: _Pixels, size_hw: tuple[int, int]) -> _Pixels:
    """Its colours without anything in it: 8 × 8 pixels of it, enlarged."""
    return _fitted(_fitted(pixels, (8, 8)), size_hw)


def _tiled(pictures: Sequence[_Pixels], grid: tuple[int, int], size_hw: tuple[int, int]) -> _Pixels:
    """As many pictures, whole ones, by turns, as the grid has fields: a crowd."""
    (rows, columns), (h, w) = grid, size_hw
    canvas = np.full((h, w, 3), 114, np.uint8)
    for i, (top, left) in enumerate(_fields(rows, columns, h // rows, w // columns)):
        picture = pictures[i % len(pictures)]
        gain = min(h // rows / picture.shape[0], w // columns / picture.shape[1])
        small_h, small_w = (max(1, int(side * gain)) for side in picture.shape[:2])
        how = cv2.INTER_AREA if gain < 1 else cv2.INTER_CUBIC
        small = cv2.resize(picture, (small_w, small_h), interpolation=how)
        canvas[top : top + small_h, left : left + small_w] = small
    return canvas


def _fields(rows: int, columns: int, height: int, width: int) -> Iterator[tuple[int, int]]:
    return ((row * height, column * width) for row in range(rows) for column in range(columns))


def _jpeg(pixels: _Pixels) -> bytes:
    return cv2.imencode(".jpg", pixels[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()


def _png(pixels: _Pixels) -> bytes:
    return cv2.imencode(".png", pixels[..., ::-1])[1].tobytes()
