"""`predict` on an embedder's engine: the command line in this process, on a small but real engine."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from small_embedder import GRID, WIDTH, build_small, pictures, small_spec

from visionfast import predict_embeddings
from visionfast.artifacts import read_manifest, write_manifest
from visionfast.cli import app
from visionfast.embedder import Embedder
from visionfast.errors import OptionError, ShapeError
from visionfast.postprocess.principal import principal_basis
from visionfast.predict_embeddings import Described, draw_patches, run_embedder, shared_basis
from visionfast.preprocess.antialias import geometry
from visionfast.sessions.embeddings import Embedded
from visionfast.types import Letterbox, PreprocessSpec, PromptSpec, Task


def predict(*arguments: str | float | Path) -> int:
    """Its exit code."""
    return int(app(["predict", *map(str, arguments)], standalone_mode=False) or 0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("openvino", reason="engines are built with openvino: pip install 'visionfast[openvino]'")
    return build_small(tmp_path_factory.mktemp("engines") / "small")


@pytest.fixture(scope="module")
def embedder(engine: Path) -> Iterator[Embedder]:
    with Embedder.open(engine) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures, a.png to c.png; b.png is higher than wide."""
    made = tmp_path_factory.mktemp("pictures")
    for name, pixels in zip("abc", pictures(3), strict=True):
        sides = sorted(pixels.shape[:2], reverse=name == "b")
        resized = cv2.resize(pixels, (sides[1], sides[0]))
        (made / f"{name}.png").write_bytes(cv2.imencode(".png", resized)[1].tobytes())
    return made


def test_words_and_json(
    engine: Path, embedder: Embedder, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(engine, folder, "--json", tmp_path / "out.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert f": {WIDTH} channels, {GRID[1]}×{GRID[0]} patches (" in lines[0]
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = embedder(sorted(folder.iterdir()))
    for record, cls, placed in zip(records, expected.cls, expected.placed, strict=True):
        assert placed is not None
        assert np.array(record["cls"], np.float32).tobytes() == cls.tobytes()  # every bit of them
        assert record["grid_hw"] == list(GRID)
        assert record["image_hw"] == list(placed.image_hw)
        assert set(record["ms"]) == {"decode", "preprocess", "engine"}
        assert set(record) == {"file", "image_hw", "cls", "grid_hw", "ms"}


def test_a_bad_file_harms_no_other(
    engine: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_text("no picture")
    assert predict(engine, folder / "a.png", bad, tmp_path / "gone.jpg", folder / "b.png", "--json", "-") == 1
    out, said = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [record.get("error", {}).get("kind") for record in records] == [None, "format", "not-found", None]
    assert "2 of 4 images could not be answered" in said


def test_pictures_are_saved(engine: Path, folder: Path, tmp_path: Path) -> None:
    assert predict(engine, folder, "--save", tmp_path / "out") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.jpg", "b.jpg", "c.jpg"]
    a = cv2.imread(str(tmp_path / "out" / "a.jpg"))
    assert a is not None
    assert min(a.shape[:2]) >= 32


# ---- colours ----------------------------------------------------------------------------------------------


def test_shared_colours_are_one_basis(embedder: Embedder, folder: Path) -> None:
    paths = sorted(folder.iterdir())
    basis = shared_basis(embedder, [paths[0], folder / "gone.png", *paths[1:]])
    patches = embedder(paths).patches
    assert basis is not None
    assert patches is not None
    np.testing.assert_array_equal(basis.axes, principal_basis(patches).axes)
    assert (basis.colours(patches[0]) != principal_basis(patches[0]).colours(patches[0])).any()


@pytest.mark.parametrize("most", [1, 2, 5, 12])
def test_a_shared_basis_of_many_images_takes_some_patches_of_each(
    embedder: Embedder, folder: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(predict_embeddings, "_SAMPLE", most)
    monkeypatch.setattr(predict_embeddings, "principal_basis", lambda rows: taken.append(len(rows)))
    shared_basis(embedder, sorted(folder.iterdir()))
    assert 1 <= taken[0] <= most


def test_no_image_has_no_basis(embedder: Embedder, tmp_path: Path) -> None:
    assert shared_basis(embedder, [tmp_path / "gone.png"]) is None
    assert shared_basis(embedder, []) is None


def test_shared_colours_on_the_command_line(engine: Path, folder: Path, tmp_path: Path) -> None:
    for name, options in {"own": (), "shared": ("--shared-colours",)}.items():
        assert predict(engine, folder, "--save", tmp_path / name, *options) == 0
    own, shared = ((tmp_path / name / "a.jpg").read_bytes() for name in ("own", "shared"))
    assert own != shared


# ---- the picture ------------------------------------------------------------------------------------------

CROP = PreprocessSpec((56, 42), "centre-crop", "bicubic-antialias", 0, cover_hw=(64, 48))
SQUASH = PreprocessSpec((56, 42), "stretch", "bicubic-antialias", 0)
COLOURS = np.random.default_rng(0).integers(0, 256, (4, 3, 3), dtype=np.uint8)


def drawn(image_hw: tuple[int, int], spec: PreprocessSpec = CROP) -> tuple[npt.NDArray[np.uint8], Letterbox]:
    image = np.full((*image_hw, 3), 100, np.uint8)
    placed = geometry(image_hw, spec)
    return draw_patches(image, COLOURS, placed), placed


def test_the_patches_lie_where_the_network_looked() -> None:
    picture, _ = drawn((640, 480))  # 10 original pixels an input pixel: the window is 40 from the top, 30 from the left
    assert picture.shape == (640, 480 + 8 + 480, 3)
    right = picture[:, 488:]
    for row in range(4):
        for column in range(3):
            patch = right[40 + 140 * row : 40 + 140 * (row + 1), 30 + 140 * column : 30 + 140 * (column + 1)]
            assert (patch == COLOURS[row, column]).all()
    outside = np.ones((640, 480), bool)
    outside[40:600, 30:450] = False
    assert (right[outside] == 35).all()  # what was not looked at is dim
    left = picture[:, :480]
    assert (left[20, 20] == 100).all()
    assert (left[40, 200] == 255).all()  # the outline


def test_of_all_that_was_looked_at_there_is_no_outline() -> None:
    picture, _ = drawn((640, 480), SQUASH)
    assert (picture[:, :480] == 100).all()
    assert (picture[:, 480:488] == 255).all()
    assert (picture[:160, 488 : 488 + 160] == COLOURS[0, 0]).all()
    assert (picture[-160:, -160:] == COLOURS[3, 2]).all()


def test_a_wide_picture_stands_above_its_patches() -> None:
    picture, _ = drawn((100, 400), SQUASH)
    assert picture.shape[0] > picture.shape[1] / 2
    beside, _ = drawn((100, 150), SQUASH)
    assert beside.shape[1] > beside.shape[0]


@pytest.mark.parametrize(
    "image_hw", [(1, 1), (1, 5000), (5000, 1), (7, 9), (57, 43), (3000, 4000), (33, 2000), (999, 41)]
)
@pytest.mark.parametrize("spec", [CROP, SQUASH], ids=["crop", "squash"])
def test_any_size(image_hw: tuple[int, int], spec: PreprocessSpec) -> None:
    picture, _ = drawn(image_hw, spec)
    assert picture.dtype == np.uint8
    assert max(picture.shape) <= 2 * 4096 + 8
    # A patch has 8 pixels at least, unless the picture would be too long for it.
    if max(image_hw) < 60 * min(image_hw):
        for colour in COLOURS.reshape(-1, 3):
            assert np.count_nonzero((picture == colour).all(axis=2)) >= 7 * 7


def test_another_image() -> None:
    with pytest.raises(ShapeError, match=r"expected \(10, 20, 3\) uint8, got \(20, 10, 3\) uint8"):
        draw_patches(np.zeros((20, 10, 3), np.uint8), COLOURS, geometry((10, 20), CROP))


# ---- engines that are not right ---------------------------------------------------------------------------


class _Broken(Embedder):
    """Gives NaN for every second image."""

    def __init__(self, good: Embedder, where: str) -> None:
        self.spec = good.spec
        self._good, self._where = good, where

    def stream(self, items: Any, **options: Any) -> Any:
        for i, (item, answer) in enumerate(self._good.stream(items, **options)):
            assert isinstance(answer, Embedded)
            if i % 2:
                broken = np.full_like(getattr(answer, self._where), np.nan)
                yield item, dataclasses.replace(answer, **{self._where: broken})
            else:
                yield item, answer


@pytest.mark.parametrize("where", ["cls", "patches"])
@pytest.mark.parametrize("shared", [False, True])
def test_nan_is_that_images_error(embedder: Embedder, folder: Path, tmp_path: Path, where: str, shared: bool) -> None:
    paths = sorted(folder.iterdir())
    out = tmp_path / "out.jsonl"
    bad = run_embedder(_Broken(embedder, where), paths, save=tmp_path / "out", json_to=str(out), shared_colours=shared)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert bad == 1
    assert records[1]["error"]["kind"] == "not-finite"
    assert "cls" in records[0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.jpg", "c.jpg"]


def test_patches_that_are_all_alike_are_grey() -> None:
    placed = geometry((64, 48), small_spec().preprocess)
    answer = Embedded(np.zeros(WIDTH, np.float32), np.ones((*GRID, WIDTH), np.float32), placed)
    picture = Described(answer).draw(np.zeros((64, 48, 3), np.uint8))
    h, w = picture.shape[0] // 2, picture.shape[1] * 3 // 4
    assert picture[h, w].tolist() == [128, 128, 128]


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--conf", "0.3"), "detector's"),
        (("--classes", "cat"), "detector's"),
        (("--no-graph",), "detector's"),
        (("--point", "3,4"), "SAM"),
        (("--everything",), "SAM"),
        (("--cache", "somewhere"), "SAM"),
        (("--boxes-from", "yolo"), "SAM"),
    ],
)
def test_options_of_others(engine: Path, folder: Path, options: tuple[str, ...], kind: str) -> None:
    words = f"^{options[0]}: .* is for embed and takes none of the options of a {kind} engine$"
    with pytest.raises(OptionError, match=words):
        predict(engine, folder, *options)


def test_shared_colours_want_pictures(engine: Path, folder: Path) -> None:
    with pytest.raises(OptionError, match=r"^--shared-colours: goes with --save"):
        predict(engine, folder, "--shared-colours")


@pytest.fixture
def engine_for(engine: Path, tmp_path: Path) -> Callable[[Task], Path]:
    """`engine_for(task)`: an engine that says that it is for it; enough to be refused."""

    def make(task: Task) -> Path:
        folder = tmp_path / task
        shutil.copytree(engine, folder)
        manifest = read_manifest(folder)
        prompts = PromptSpec(box_first=True, pad_with_box=True) if task == "prompt-segment" else None
        spec = dataclasses.replace(manifest.spec, task=task, prompts=prompts)
        write_manifest(folder, dataclasses.replace(manifest, spec=spec))
        return folder

    return make


@pytest.mark.parametrize("task", ["detect", "segment", "prompt-segment"])
def test_others_have_no_colours(engine_for: Callable[[Task], Path], folder: Path, task: Task) -> None:
    words = rf"^--shared-colours: .* is for {task} and takes none of the options of a DINO engine$"
    with pytest.raises(OptionError, match=words):
        predict(engine_for(task), folder, "--shared-colours", "--save", "out")


def test_an_embedder_finds_no_boxes(engine: Path, engine_for: Callable[[Task], Path], folder: Path) -> None:
    with pytest.raises(OptionError, match=r"^--boxes-from .*: expected a detector's engine, got one for embed$"):
        predict(engine_for("prompt-segment"), folder, "--boxes-from", engine)


def test_a_picture_does_not_overwrite_its_original(engine: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(cv2.imencode(".jpg", cv2.imread(str(folder / "a.png")))[1].tobytes())
    before = (tmp_path / "a.jpg").read_bytes()
    with pytest.raises(OptionError, match="overwrite its original"):
        predict(engine, tmp_path / "a.jpg", "--save", tmp_path)
    assert (tmp_path / "a.jpg").read_bytes() == before


def test_a_picture_does_not_overwrite_another_image(engine: Path, folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(folder / f"{name}.png", tmp_path / name / "x.jpg")
    sources = tmp_path / "a" / "x.jpg", tmp_path / "b" / "x.jpg"
    before = [path.read_bytes() for path in sources]
    words = rf"--save .*/b: the picture of .*/a/x.jpg would overwrite {sources[1]}, an image of this call; name another"
    with pytest.raises(OptionError, match=words):
        predict(engine, *sources, "--save", tmp_path / "b")
    with pytest.raises(OptionError, match=rf"--json .*x.jpg: would overwrite {sources[0]}, an image of this call"):
        predict(engine, *sources, "--json", sources[0])
    assert [path.read_bytes() for path in sources] == before
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["x.jpg"]


def test_a_name_as_long_as_names_can_be(
    engine: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fits, no_room = tmp_path / f"{'ö' * 125}a.png", tmp_path / ("y" * 255)
    for path in (fits, no_room):
        shutil.copy(folder / "a.png", path)
    out, found = tmp_path / "out", tmp_path / f"{'z' * 249}.jsonl"
    sources = no_room, fits, folder / "b.png"
    assert predict(engine, *sources, "--save", out, "--json", found) == 1
    assert sorted(path.name for path in out.iterdir()) == ["b.jpg", f"{'ö' * 125}a.jpg"]
    assert [Path(json.loads(line)["file"]).name for line in found.read_text("utf-8").splitlines()] == [
        path.name for path in sources
    ]
    complaint, count = capsys.readouterr().err.splitlines()
    assert complaint.startswith(f"visionfast: {no_room}: its picture cannot be called yyy")
    assert complaint.endswith("y.jpg (File name too long); rename the file")
    assert count == "visionfast: 1 of 3 images could not be answered"


def test_a_truncated_file_is_drawn_on_request(engine: Path, folder: Path, tmp_path: Path) -> None:
    whole = cv2.imencode(".jpg", cv2.resize(cv2.imread(str(folder / "a.png")), (300, 200)))[1].tobytes()
    (tmp_path / "half.jpg").write_bytes(whole[: len(whole) // 2])
    assert predict(engine, tmp_path / "half.jpg") == 1
    assert predict(engine, tmp_path / "half.jpg", "--allow-truncated", "--save", tmp_path / "out") == 0
    assert (tmp_path / "out" / "half.jpg").is_file()
    shutil.rmtree(tmp_path / "out")
