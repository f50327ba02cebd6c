"""The verb `verify`: what it shows, what it complains about, and its exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small_dataset import annotation, document, write_dataset

from visionfast.artifacts import read_manifest, write_manifest
from visionfast.cli import app
from visionfast.errors import OptionError


@pytest.fixture
def home(engine_home: Path, copied_engine: Path, reduced_photographs: Callable[[int], list[Path]]) -> Path:
    """With the engine `small`, a data set of one image, and another that has a second one, which is missing."""
    from PIL import Image

    assert copied_engine.is_dir()
    picture = reduced_photographs(4)[0]
    with Image.open(picture) as image:
        image_hw = (image.height, image.width)
    for name, images in (("good", {"a.png": image_hw}), ("poor", {"a.png": image_hw, "gone.png": (3, 4)})):
        folder = write_dataset(engine_home / name, document(images, [annotation(1, 1)], {1: "kind 0", 9: "cow"}))
        shutil.copy(picture, folder / "val" / "a.png")
    return engine_home


def run(*arguments: str | Path) -> int:
    """The exit code; errors come as they are."""
    code = app([str(argument) for argument in ("verify", *arguments)], standalone_mode=False)
    return code if isinstance(code, int) else 0


def test_a_report(home: Path, seeded_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    weights = seeded_checkpoint("detect", 3)
    code = run("small", "--dataset", home / "good", "--weights", weights, "--json", home / "out" / "report.json")
    out, err = capsys.readouterr()
    assert code == 0
    assert "1 images, 1 objects" in out
    (row,) = [line.split() for line in out.splitlines() if "mAP50-95" in line]
    assert row[:2] == ["boxes", "mAP50-95"]
    assert row[2] == row[3]
    assert row[4] == "+0.00"
    assert out.endswith("passed\n")
    assert "the data set has no category for the engine's kind 1, kind 2 (2): left out" in err
    assert "the engine has no class for the data set's cow (1): left out" in err
    content = json.loads((home / "out" / "report.json").read_text())
    assert content["passed"] is True
    assert content["images"] == 1


def test_a_bad_image_and_a_failed_certificate(
    home: Path, copied_engine: Path, seeded_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "models").mkdir()
    shutil.copy(seeded_checkpoint("detect", 3), home / "models" / "found-by-its-hash.pt")
    assert run("small", "--dataset", home / "poor", "--json", "-") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["bad_images"][0]["kind"] == "not-found"
    assert "visionfast: gone.png: " in err
    assert "1 of 2 images were bad" in err
    manifest = read_manifest(copied_engine)
    write_manifest(copied_engine, replace(manifest, certificate=replace(manifest.certificate, status="failed")))
    assert run("small", "--dataset", home / "good") == 1
    out, err = capsys.readouterr()
    assert out.endswith("failed\n")
    assert "the certificate failed" in err


def test_the_report_overwrites_nothing(home: Path) -> None:
    annotations = home / "good" / "annotations" / "instances_val.json"
    before = annotations.read_bytes()
    for target, word in (
        (annotations, "would overwrite the data set's annotations"),
        (home / "good" / "val" / "a.png", "name of an image"),
        (home / "small.pt", "of weights"),
        (next((home / "engines" / "small").iterdir()) / "engine.json", "in an engine's folder"),
    ):
        with pytest.raises(OptionError, match=word):
            run("small", "--dataset", home / "good", "--json", target)
    assert annotations.read_bytes() == before


def test_a_reference_that_there_is_not(home: Path) -> None:
    with pytest.raises(OptionError, match="expected eager or naive"):
        run("small", "--dataset", home / "good", "--reference", "official")


def test_weights_that_are_nowhere(home: Path) -> None:
    from visionfast.errors import ArtifactError

    with pytest.raises(ArtifactError, match="name it with --weights"):
        run("small", "--dataset", home / "good")
