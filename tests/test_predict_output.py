"""What `predict` writes, and where: files, links, pipes and names that are no text."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from visionfast.errors import ArtifactError, ImageError, OptionError
from visionfast.postprocess.masks import InstanceMasks
from visionfast.predict_output import check_targets, report
from visionfast.predict_prompts import Segmented
from visionfast.results import Masks


class Found:
    image_hw = (4, 6)

    def __init__(self, record: dict[str, Any] | None = None) -> None:
        self.stage_ns = {"engine": 1_500_000}
        self._record = record or {"objects": 2}

    def words(self) -> str:
        return "2 objects"

    def record(self) -> dict[str, Any]:
        return self._record

    def draw(self, image_rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return image_rgb


def _report(json_to: str, *paths: Path, found: Any = None) -> int:
    return report([(path, found or Found()) for path in paths], paths, save=None, json_to=json_to)


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    _report(str(pipe), Path("a.jpg"))
    reader.join(timeout=30)
    assert json.loads(read[0])["file"] == "a.jpg"
    assert pipe.is_fifo()


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("before")
    (tmp_path / "link.jsonl").symlink_to("there.jsonl")
    _report(str(tmp_path / "link.jsonl"), Path("a.jpg"))
    assert (tmp_path / "link.jsonl").is_symlink()
    assert json.loads((tmp_path / "there.jsonl").read_text())["objects"] == 2


def test_a_device_stays_one() -> None:
    before = Path(os.devnull).stat()
    _report(os.devnull, Path("a.jpg"))
    assert (Path(os.devnull).stat().st_mode, Path(os.devnull).stat().st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize("target", ["", "."])
def test_no_file_to_write(target: str) -> None:
    with pytest.raises(OptionError, match="expected a file to write, or - for stdout"):
        _report(target, Path("a.jpg"))


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path(os.fsdecode(b"bad\xff.jpg"))
    _report(str(tmp_path / "found.jsonl"), odd, Path("näher.jpg"))
    names = [json.loads(line)["file"] for line in (tmp_path / "found.jsonl").read_text("utf-8").splitlines()]
    assert names == ["bad\\xff.jpg", "näher.jpg"]
    assert capsys.readouterr().out.startswith("bad\\xff.jpg: 6×4: 2 objects (1.5 ms)\nnäher.jpg: ")


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    masks = Masks(
        mask=InstanceMasks.from_dense(np.zeros((2, 4, 6), bool)),
        score=np.array([math.nan, 0.5], np.float32),
        prompt=np.zeros(2, np.int64),
        image_hw=(4, 6),
    )
    _report(str(tmp_path / "found.jsonl"), Path("a.jpg"), found=Segmented(masks, None))
    record = json.loads((tmp_path / "found.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [one["score"] for one in record["masks"]] == [None, 0.5]


# ---- what is read is not overwritten ----------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """a/x.jpg and b/x.jpg."""
    made = [tmp_path / name / "x.jpg" for name in "ab"]
    for path in made:
        path.parent.mkdir()
        path.write_bytes(cv2.imencode(".jpg", np.zeros((4, 6, 3), np.uint8))[1].tobytes())
    return made


def _refused(words: str, paths: list[Path], **options: Any) -> None:
    asked = iter([pytest.fail])  # whoever asks for an answer fails

    def answers() -> Any:
        next(asked)("an answer was asked for")
        yield

    with pytest.raises(OptionError, match=words):
        report(answers(), paths, **{"save": None, "json_to": None} | options)


def test_json_does_not_overwrite_an_image(images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link.jsonl").symlink_to("b/x.jpg")
    (tmp_path / "hard.jsonl").hardlink_to(images[1])
    (tmp_path / "c").symlink_to("b", target_is_directory=True)
    monkeypatch.chdir(tmp_path / "a")
    for target in (images[1], "../b/x.jpg", tmp_path / "link.jsonl", tmp_path / "hard.jsonl", tmp_path / "c/x.jpg"):
        words = (
            f"^--json {re.escape(str(target))}: would overwrite {images[1]}, an image of this call; name another file$"
        )
        _refused(words, images, json_to=str(target))


def test_a_picture_does_not_overwrite_an_image(images: list[Path], tmp_path: Path) -> None:
    words = f"the picture of {images[0]} would overwrite {images[1]}, an image of this call; name another folder$"
    _refused(words, images, save=tmp_path / "b")
    (tmp_path / "c").symlink_to("b", target_is_directory=True)
    _refused(words, images, save=tmp_path / "c")
    _refused("would overwrite its original; name another folder$", images, save=tmp_path / "a")
    # Numbered for another's sake.
    third = tmp_path / "third" / "x-2.jpg"
    third.parent.mkdir()
    third.write_bytes(images[0].read_bytes())
    _refused(f"the picture of {images[1]} would overwrite {third}", [*images, third], save=third.parent)
    # One that is missing now would be found when its turn comes.
    missing = tmp_path / "later" / "x.jpg"
    _refused(f"the picture of {images[0]} would overwrite {missing}", [images[0], missing], save=tmp_path / "later")


def test_an_image_that_comes_late_is_not_overwritten(
    images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = tmp_path / "late.jpg"

    def answers() -> Any:
        late.write_bytes(images[0].read_bytes())
        yield late, Found()

    assert report(answers(), [late], save=tmp_path, json_to=None) == 1
    assert late.read_bytes() == images[0].read_bytes()
    assert f"{late}: its picture would overwrite it" in capsys.readouterr().err


def test_json_and_a_picture_do_not_overwrite_one_another(images: list[Path], tmp_path: Path) -> None:
    _refused("a picture of --save would overwrite it", images, save=tmp_path, json_to=str(tmp_path / "x-2.jpg"))


def test_pictures_go_into_a_folder(images: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _refused("expected a folder, got a file", images, save=tmp_path / "file")


@pytest.mark.parametrize("json_to", [None, "-", "found.jsonl", os.devnull])
def test_what_overwrites_nothing(images: list[Path], tmp_path: Path, json_to: str | None) -> None:
    check_targets([*images, tmp_path / "missing.jpg"], save=tmp_path / "out", json_to=json_to)
    check_targets(images, save=tmp_path, json_to=json_to)


# ---- one picture's fault ----------------------------------------------------------------------------------


def test_a_picture_that_cannot_be_saved_harms_no_other(
    images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five files one has a folder in its picture's place, one went away, one is another by now."""
    gone, grown = tmp_path / "gone.jpg", tmp_path / "grown.jpg"
    grown.write_bytes(cv2.imencode(".jpg", np.zeros((5, 6, 3), np.uint8))[1].tobytes())
    out = tmp_path / "out"
    (out / "x.jpg").mkdir(parents=True)
    paths = [*images, gone, grown, tmp_path / "bad.jpg"]
    answers = [(path, Found()) for path in paths[:-1]] + [(paths[-1], ImageError(str(paths[-1]), "is no image"))]
    assert report(answers, paths, save=out, json_to=str(tmp_path / "found.jsonl")) == 4  # type: ignore[arg-type]
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 5
    assert (out / "x-2.jpg").is_file()
    assert not (out / "grown.jpg").exists()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines[:-1]] == [str(images[0]), *map(str, paths[2:])]
    assert lines[0].endswith("its picture cannot be called x.jpg (Is a directory); rename the file")
    assert lines[-1] == "visionfast: 4 of 5 images could not be answered"


def test_a_folder_that_cannot_be_made_is_everybodys_fault(images: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be written"):
        report([(images[0], Found())], images[:1], save=tmp_path / ("y" * 256), json_to=None)


def test_a_name_of_the_json_that_is_too_long_is_known_at_once(tmp_path: Path) -> None:
    answered = iter([(Path("a.jpg"), Found())])
    with pytest.raises(ArtifactError, match=r"cannot be written \(File name too long\)"):
        report(answered, [Path("a.jpg")], save=None, json_to=str(tmp_path / ("y" * 256)))
    assert next(answered)
    assert list(tmp_path.iterdir()) == []


# ---- terminals --------------------------------------------------------------------------------------------


def test_a_terminal_obeys_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = Path("a\x1b[2J\n\u202egpj.exe")
    paths = [odd, Path("\x9bb.jpg")]
    answers = [(paths[0], Found()), (paths[1], ImageError(str(paths[1]), "is \x1b[1m none"))]
    assert report(answers, paths, save=None, json_to=str(tmp_path / "found.jsonl")) == 1  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert shown.out == "a\\x1b[2J\\n\\u202egpj.exe: 6×4: 2 objects (1.5 ms)\n"
    assert shown.err.splitlines()[0] == "visionfast: \\x9bb.jpg: is \\x1b[1m none"
    records = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text("utf-8").splitlines()]
    assert [record["file"] for record in records] == list(map(str, paths))
