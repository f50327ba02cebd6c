"""Mixes are the same every time, and other bytes are the same picture."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from visionfast.bench.inputs import distinct, folder_mix, input_of, made_mix
from visionfast.errors import ImageError, OptionError
from visionfast.preprocess.decode import decode_image


def picture(shape: tuple[int, ...] = (24, 36, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def encoded(suffix: str, shape: tuple[int, ...] = (24, 36, 3), seed: int = 0) -> bytes:
    return cv2.imencode(suffix, picture(shape, seed))[1].tobytes()


def turned() -> bytes:
    """A JPEG that stands on its side, by its EXIF orientation."""
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture()).save(out, "jpeg", exif=exif)
    return out.getvalue()


def test_the_made_mix_is_as_traffic_is(photographs: list[Path]) -> None:
    mix = made_mix(photographs)
    assert len(mix) == len({i.sha256 for i in mix}) == len({i.name for i in mix}) == 12
    assert {i.format for i in mix} == {"jpeg", "png"}
    sizes = [h * w for h, w in (i.image_hw for i in mix)]
    assert min(sizes) == 160 * 120
    assert max(sizes) == 3840 * 2160
    assert mix[0].encoded == photographs[0].read_bytes()
    assert mix[0].image_hw == (1080, 810)
    assert all(len(i.encoded) == i.n_bytes for i in mix)
    empty = next(i for i in mix if i.name.startswith("empty"))
    assert decode_image(empty.encoded, name="empty").std() > 1  # colours, and nothing with an edge
    assert np.abs(np.diff(decode_image(empty.encoded, name="empty").astype(int), axis=1)).max() < 16


def test_the_made_mix_is_the_same_again(photographs: list[Path]) -> None:
    assert [i.sha256 for i in made_mix(photographs, most=4)] == [i.sha256 for i in made_mix(photographs, most=4)]
    assert len(made_mix(photographs, most=1)) == 1
    assert len(made_mix(photographs[:1], most=3)) == 3


def test_a_folder_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(encoded(".png", seed=i))
    (tmp_path / "below" / "ä.jpg").write_bytes(encoded(".jpg", (9, 5, 3)))
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "other.webp").write_bytes(encoded(".webp"))
    (tmp_path / "notes.txt").write_text("no image")
    found, left_out = folder_mix(tmp_path)
    assert sorted(i.name for i in found) == ["0.png", "1.png", "2.png", "3.png", "4.png", "5.png", "below/ä.jpg"]
    assert sorted(left_out) == ["broken.jpg", "other.webp"]
    assert next(i for i in found if i.format == "jpeg").image_hw == (9, 5)
    some, _ = folder_mix(tmp_path, most=3)
    assert [i.name for i in some] == [i.name for i in folder_mix(tmp_path, most=3)[0]]
    assert len(some) == 3
    others = {tuple(i.name for i in folder_mix(tmp_path, seed=seed, most=3)[0]) for seed in range(6)}
    assert len(others) > 1


def test_a_folder_without_images(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a folder with JPEG or PNG images"):
        folder_mix(tmp_path)
    with pytest.raises(OptionError):
        folder_mix(tmp_path / "none")


@pytest.mark.parametrize("original", [encoded(".jpg"), encoded(".png"), turned(), encoded(".jpg", (24, 36))])
def test_other_bytes_are_the_same_picture(original: bytes) -> None:
    made = [distinct(original, number) for number in (0, 1, 10**15)]
    assert len({original, *made}) == 4
    for other in made:
        assert (decode_image(other, name="other") == decode_image(original, name="original")).all()
        Image.open(io.BytesIO(other)).verify()
    assert distinct(original, 1) == made[1]
    assert input_of("one", made[0]).image_hw == input_of("one", original).image_hw


def test_other_formats_have_no_other_bytes() -> None:
    with pytest.raises(OptionError, match="a JPEG or a PNG"):
        distinct(encoded(".webp"), 0)
    with pytest.raises(ImageError):
        input_of("none", b"")
    assert input_of("w", encoded(".webp")).format == "webp"
