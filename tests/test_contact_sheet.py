"""Contact sheets: where the images lie, and what becomes of those that cannot be shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from visionfast import contact_sheet as module
from visionfast.contact_sheet import COLUMNS, Row, Tile, contact_sheet
from visionfast.errors import ImageTruncatedError, OptionError
from visionfast.preprocess.limits import DecodeLimits

CELL_W, CELL_H, MARGIN, SIDE = module._CELL_W, module._CELL_H, module._MARGIN, module._SIDE
GREY = np.array(module._GREY)


@pytest.fixture(scope="module")
def red(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _picture(tmp_path_factory.mktemp("pictures") / "red.png", (30, 60), (255, 0, 0))


@pytest.fixture(scope="module")
def blue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _picture(tmp_path_factory.mktemp("pictures") / "blue.png", (500, 400), (0, 0, 255))


def _picture(path: Path, hw: tuple[int, int], rgb: tuple[int, int, int]) -> Path:
    path.write_bytes(cv2.imencode(".png", np.full((*hw, 3), rgb[::-1], np.uint8))[1].tobytes())
    return path


def _middle(sheet: np.ndarray, column: int, line: int = 0) -> list[int]:
    """The pixel in the middle of a thumbnail; column -1 is the query's."""
    left = MARGIN if column < 0 else 2 * MARGIN + (1 + column) * CELL_W
    pixel: list[int] = sheet[MARGIN + line * CELL_H + SIDE // 2, left + SIDE // 2].tolist()
    return pixel


def test_the_query_is_at_the_left_and_its_nearest_beside_it(red: Path, blue: Path) -> None:
    sheet = contact_sheet([Row(Tile(red, "query", "red.png"), [Tile(blue, "1", "blue"), Tile(red, "2", "red")])])
    assert sheet.shape == (MARGIN + CELL_H, 2 * MARGIN + 3 * CELL_W, 3)
    assert sheet.dtype == np.uint8
    assert [_middle(sheet, i) for i in (-1, 0, 1)] == [[255, 0, 0], [0, 0, 255], [255, 0, 0]]


def test_thumbnails_keep_their_aspect(red: Path, blue: Path) -> None:
    sheet = contact_sheet([Row(Tile(red, "query", ""), [Tile(blue, "", "")])])
    assert np.count_nonzero((sheet == (255, 0, 0)).all(axis=2)) == SIDE * SIDE // 2
    assert np.count_nonzero((sheet == (0, 0, 255)).all(axis=2)) == SIDE * SIDE * 4 // 5


def test_more_than_a_line_goes_on_in_the_next(red: Path, blue: Path) -> None:
    many = [Tile(red, str(i), "") for i in range(COLUMNS)] + [Tile(blue, "", "")]
    sheet = contact_sheet([Row(Tile(red, "query", ""), many), Row(Tile(blue, "query", ""), [])])
    assert _middle(sheet, COLUMNS - 1) == [255, 0, 0]
    assert _middle(sheet, 0, line=1) == [0, 0, 255]
    assert _middle(sheet, -1, line=1) == [255, 255, 255]
    second = MARGIN + 2 * CELL_H + MARGIN + SIDE // 2  # the next query's row, under a rule
    assert sheet[second, MARGIN + SIDE // 2].tolist() == [0, 0, 255]
    assert (sheet[MARGIN + 2 * CELL_H, MARGIN : -MARGIN - 1] == GREY).all()


def test_a_query_without_neighbours(red: Path) -> None:
    sheet = contact_sheet([Row(Tile(red, "query", "red.png"), [])])
    assert sheet.shape == (MARGIN + CELL_H, MARGIN + CELL_W, 3)


def _drawn(monkeypatch: pytest.MonkeyPatch, *tiles: Tile, limits: DecodeLimits | None = None) -> list[str]:
    """What is written on a sheet with these tiles."""
    from PIL import ImageDraw

    texts: list[str] = []
    write = ImageDraw.ImageDraw.text

    def recorded(self: ImageDraw.ImageDraw, xy: tuple[float, float], text: str, *rest: Any, **options: Any) -> None:
        texts.append(text)
        write(self, xy, text, *rest, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", recorded)
    sheet = contact_sheet([Row(tiles[0], tiles[1:])], limits=limits)
    for i in range(len(tiles)):
        corner = sheet[MARGIN + 10, (MARGIN if i == 0 else 2 * MARGIN + i * CELL_W) + 10]
        assert (corner == GREY).all()
    return texts


@pytest.mark.parametrize("kind", ["missing", "folder", "text", "half a WebP", "nowhere", "no name"])
def test_what_cannot_be_shown_is_grey_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path: Path | None = tmp_path / "file.jpg"
    assert path is not None
    word = "missing"
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_text("no picture")
        word = "not an image"
    elif kind == "half a WebP":
        Image.effect_noise((64, 64), 50).convert("RGB").save(path, "WEBP")
        path.write_bytes(path.read_bytes()[:500])
        word = "damaged"
    elif kind == "no name":
        path = Path("a\0b")
    else:
        path = None if kind == "nowhere" else path
    assert _drawn(monkeypatch, Tile(path, "1   0.5", "file.jpg")) == [word, "1   0.5", "file.jpg"]


def test_what_is_known_to_be_bad_is_not_opened(blue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImageTruncatedError("b.jpg", "it ends early")
    assert _drawn(monkeypatch, Tile(blue, "query", "b.jpg", error)) == ["damaged", "query", "b.jpg"]


def test_too_large(blue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _drawn(monkeypatch, Tile(blue, "a", "b"), limits=DecodeLimits(max_pixels=1000))
    assert texts == ["too large", "a", "b"]


def test_a_truncated_jpeg_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "half.jpg"
    whole = cv2.imencode(".jpg", np.full((400, 400, 3), (0, 0, 255), np.uint8))[1].tobytes()
    path.write_bytes(whole[:-200])
    sheet = contact_sheet([Row(Tile(path, "query", ""), [])])
    assert abs(sheet[MARGIN + 20, MARGIN + 80].astype(int) - (254, 0, 0)).max() < 4


NAMES = [
    "plain.jpg",
    "",
    "фото/кошка.jpg",
    "図書館の写真.jpg",
    "صورة.jpg",
    "emoji \U0001f600\U0001f468\u200d\U0001f469.jpg",
    "line\nbreak\ttab\r.jpg",
    "bytes \udcff\udc80.jpg",
    "\u202ereversed.jpg",
    "combining e\u0301\u0301\u0301\u0301.jpg",
    "x" * 100_000,
    "\U000e0001\ufffe\x7f",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:20]))
def test_any_name_is_written_and_fits(red: Path, name: str) -> None:
    with_name = contact_sheet([Row(Tile(red, "query", name), [Tile(red, "1", "")])])
    without = contact_sheet([Row(Tile(red, "query", ""), [Tile(red, "1", "")])])
    shown, font = module._fitted(name)
    assert font.getlength(shown) <= SIDE
    # Nothing of it reaches the next column.
    right = 2 * MARGIN + CELL_W
    np.testing.assert_array_equal(with_name[:, right:], without[:, right:])
    assert name == "" or (with_name != without).any()


def test_the_end_of_a_long_name_is_shown() -> None:
    shown, _ = module._fitted("a/very/long/way/to/the/folder/with/the/photographs/0123.jpg")
    assert shown.startswith("…")
    assert shown.endswith("photographs/0123.jpg")


def test_nothing_to_show() -> None:
    with pytest.raises(OptionError, match=r"^contact sheet: expected 1 to \d+ lines of images, got 0;"):
        contact_sheet([])


def test_a_sheet_that_nothing_would_show(red: Path) -> None:
    with pytest.raises(OptionError, match=r"^contact sheet: .* lines of images, got 10000; ask for fewer"):
        contact_sheet([Row(Tile(red, "query", ""), [Tile(red, "", "")] * (COLUMNS * 10_000))])


@pytest.mark.parametrize("hw", [(1, 3000), (3000, 1), (1, 1)])
def test_extreme_aspects(tmp_path: Path, hw: tuple[int, int]) -> None:
    path = _picture(tmp_path / "thin.png", hw, (255, 0, 0))
    sheet = contact_sheet([Row(Tile(path, "query", ""), [])])
    height, width = (max(1, round(side * SIDE / max(hw))) for side in hw)
    assert np.count_nonzero((sheet == (255, 0, 0)).all(axis=2)) == height * width
