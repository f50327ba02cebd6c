"""What `predict` writes, and where: files, links, pipes and names that are no text."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from visionfast.errors import OptionError
from visionfast.postprocess.masks import InstanceMasks
from visionfast.predict_output import report
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
