"""What stands on disk is the old or the new, never a half; what is read from it is checked."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from visionfast import artifacts
from visionfast.errors import ArtifactError, ManifestError
from visionfast.types import Certificate, EngineManifest, GraphSpec, ModelSpec, PreprocessSpec, TensorSpec


def _manifest(content: bytes = b"weights") -> EngineManifest:
    import hashlib

    graph = GraphSpec(
        "model",
        (TensorSpec("images", (1, 32, 64, 3), "uint8", "NHWC"),),
        (TensorSpec("predictions", (1, 6, 42), "float32"),),
    )
    spec = ModelSpec("small", "yolov8", "yolov8n", "detect", (graph,), PreprocessSpec((32, 64)), ("a", "ü"), (8, 16))
    return EngineManifest(
        spec=spec,
        backend="openvino",
        precision="fp32",
        device="cpu",
        runtime_version="2026.1.0",
        files={"model": "model.bin"},
        sha256={"model.bin": hashlib.sha256(content).hexdigest()},
        onnx_sha256={"model": "0" * 64},
        weights_sha256="1" * 64,
        keep_fp32=("decode",),
        certificate=Certificate(
            "passed", "eager", {"min_iou": 0.99, "unmatched": 0}, {"min_iou": 1.0}, ({"file": "a.jpg", "objects": 2},)
        ),
        created="2026-01-01T00:00:00+00:00",
        visionfast_version="0.0",
    )


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"weights")
    artifacts.write_manifest(folder, _manifest())
    return folder


def _one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "engine.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# ---- engine.json ------------------------------------------------------------------------------------------


def test_manifest_round_trip(engine: Path) -> None:
    assert artifacts.read_manifest(engine, verify=True) == _manifest()
    assert sorted(p.name for p in engine.iterdir()) == ["engine.json", "model.bin"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"{}", b'{"format": 2}', b"\xff\xfe\x00", b"[" * 100_000, b'{"format": 1}'],
)
def test_damaged_manifest(engine: Path, content: bytes) -> None:
    (engine / "engine.json").write_bytes(content)
    with pytest.raises(ManifestError, match=r"engine\.json.*build the engine again") as caught:
        artifacts.read_manifest(engine)
    _one_line(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(colour=1), "unknown key 'colour'; the keys are backend"),
        (lambda d: d["spec"].update(tusk="detect"), "unknown key 'tusk'"),
        (lambda d: d.pop("backend"), "the key 'backend' is missing"),
        (lambda d: d["spec"]["preprocess"].pop("size_hw"), "the key 'size_hw' is missing"),
        (lambda d: d.update(precision="int4"), "expected one of 'fp32', 'fp16', 'bf16', got 'int4'"),
        (lambda d: d.update(precision=["fp32"]), "expected one of 'fp32'"),
        (lambda d: d.update(backend=None), "expected str, got None"),
        (lambda d: d.update(files=["model.bin"]), "files: expected an object, got list"),
        (lambda d: d["spec"].update(class_names="ab"), "class_names: expected a list, got str"),
        (lambda d: d["spec"].update(class_names=["a", 2]), r"class_names\[1\]: expected str, got 2"),
        (lambda d: d["spec"]["preprocess"].update(size_hw=[32]), "size_hw: expected 2 values, got 1"),
        (lambda d: d["spec"]["preprocess"].update(size_hw=[32.5, 64]), "expected int, got 32.5"),
        (lambda d: d["spec"]["preprocess"].update(pad_value=True), "expected int, got True"),
        (lambda d: d.update(spec="small"), "spec: expected an object, got str"),
        (lambda d: d.update(sha256={}), "no sha256 for 'model.bin'"),
        (lambda d: d.update(files={}), "no file for the graph 'model'"),
        (lambda d: d["spec"].update(graphs=[]), "expected at least one graph"),
        (lambda d: d["spec"]["graphs"][0].update(inputs=[]), "expected at least one input"),
        (lambda d: d["spec"]["graphs"][0]["inputs"][0].update(shape=[]), "images: expected a shape"),
        (lambda d: d["spec"]["graphs"][0]["inputs"][0].update(shape=[0, 32, 64, 3]), "images: expected a shape"),
        (lambda d: d["spec"]["graphs"][0]["outputs"][0].update(shape=[1, -6, 42]), "predictions: expected a shape"),
        (lambda d: d["spec"]["preprocess"].update(size_hw=[-32, 64]), "preprocess: expected sides of at least 1"),
        (lambda d: d["spec"]["preprocess"].update(pad_value=999), "preprocess: expected .* pad_value 0..255"),
        (lambda d: d["spec"]["preprocess"].update(std=[1, 0, 1]), "preprocess: expected .* no std of 0"),
        (lambda d: d.update(device=""), "device: expected cpu, cuda or a GPU generation such as sm89, got ''"),
        (lambda d: d.update(device="sm89\n"), r"device: expected cpu, cuda .*, got 'sm89\\n'"),
        (lambda d: d.update(device="cuda:1"), "device: expected cpu, cuda .*, got 'cuda:1'"),
    ],
)
def test_mistyped_manifest(engine: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    _edit(engine, change)
    with pytest.raises(ManifestError, match=says) as caught:
        artifacts.read_manifest(engine)
    assert str(engine / "engine.json") in _one_line(caught.value)


@pytest.mark.parametrize(
    "name", ["../model.bin", "/etc/passwd", "", ".", "..", "sub/model.bin", "model.bin/", "a\nb", "a\0b"]
)
def test_a_manifest_names_files_beside_it_only(engine: Path, name: str) -> None:
    (engine.parent / "model.bin").write_bytes(b"weights")

    def point_elsewhere(document: dict[str, Any]) -> None:
        document["files"] = {"model": name}
        document["sha256"] = {name: "0" * 64}

    _edit(engine, point_elsewhere)
    with pytest.raises(ManifestError) as caught:
        artifacts.read_manifest(engine)
    _one_line(caught.value)


def test_missing_and_changed_files(engine: Path, tmp_path: Path) -> None:
    (engine / "model.bin").write_bytes(b"Weights")
    artifacts.read_manifest(engine)
    with pytest.raises(ManifestError, match="it was changed: build it again"):
        artifacts.read_manifest(engine, verify=True)
    (engine / "model.bin").unlink()
    with pytest.raises(ManifestError, match=r"model\.bin.* is missing beside it"):
        artifacts.read_manifest(engine)
    with pytest.raises(ManifestError, match=r"there is no engine\.json in it"):
        artifacts.read_manifest(tmp_path / "nowhere")


# ---- writing ----------------------------------------------------------------------------------------------


def test_atomic_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    with artifacts.atomic_folder(target) as folder:
        (folder / "one").write_text("1")
        assert not target.exists()
    assert (target / "one").read_text() == "1"
    assert [p.name for p in target.parent.iterdir()] == ["b"]


def test_atomic_folder_replaces(tmp_path: Path) -> None:
    target = tmp_path / "b"
    target.mkdir()
    (target / "old").touch()
    with artifacts.atomic_folder(target) as folder:
        (folder / "new").touch()
        assert (target / "old").exists()
    assert [p.name for p in tmp_path.rglob("*")] == ["b", "new"]


@pytest.mark.parametrize("interruption", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(1)])
@pytest.mark.parametrize("replaces", [False, True])
def test_atomic_folder_vanishes(tmp_path: Path, interruption: BaseException, replaces: bool) -> None:
    target = tmp_path / "b"
    if replaces:
        target.mkdir()
        (target / "old").touch()

    def interrupted() -> None:
        with artifacts.atomic_folder(target) as folder:
            (folder / "half").touch()
            raise interruption

    with pytest.raises(type(interruption)):
        interrupted()
    assert [p.name for p in tmp_path.rglob("*")] == (["b", "old"] if replaces else [])


def test_atomic_folder_keeps_the_old_one_when_the_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "b"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def refuse_the_new_one(self: Path, to: Path) -> Path:
        if (self / "new").exists():
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(ArtifactError, match="Input/output error"), artifacts.atomic_folder(target) as folder:
        (folder / "new").touch()
    assert [p.name for p in tmp_path.rglob("*")] == ["b", "old"]


def _fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def fdopen(handle: int, *_: Any) -> io.BytesIO:
        os.close(handle)
        return Full()

    monkeypatch.setattr(os, "fdopen", fdopen)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine.json"
    file.write_text("old")
    with monkeypatch.context() as patch:
        _fill_the_disk(patch)
        with pytest.raises(ArtifactError, match="the disk is full") as caught:
            artifacts.atomic_write(file, b"new")
        _one_line(caught.value)
        with pytest.raises(ArtifactError, match="the disk is full"), artifacts.atomic_folder(tmp_path / "e") as folder:
            artifacts.write_manifest(folder, _manifest())
    assert [p.name for p in tmp_path.rglob("*")] == ["engine.json"]
    assert file.read_text() == "old"


def test_full_disk_in_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="the disk is full"), artifacts.atomic_folder(tmp_path / "e"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="cannot be written"), artifacts.atomic_folder(tmp_path / "file" / "e"):
        pytest.fail("the block must not run")
    with pytest.raises(ArtifactError, match="cannot be written"):
        artifacts.atomic_write(tmp_path / "file" / "e", b"")


# ---- finding ----------------------------------------------------------------------------------------------


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with (
        pytest.raises(ArtifactError, match=r"cannot be written \(File name too long\)"),
        artifacts.atomic_folder(tmp_path / ("a" * 300) / "variant"),
    ):
        pass


def test_find_model(engine_home: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"people: no such file.*nothing yet.*visionfast fetch"):
        artifacts.find_model("people")
    loose, inside = engine_home / "models" / "loose.pt", engine_home / "models" / "people" / "best.pt"
    inside.parent.mkdir(parents=True)
    loose.touch()
    inside.touch()
    for reference, expected in [
        ("loose", loose),
        ("loose.pt", loose),
        ("people", inside),
        ("best", inside),
        (str(inside.parent), inside),
        (str(inside), inside),
    ]:
        assert artifacts.find_model(reference) == expected
    with pytest.raises(ArtifactError, match=r"there: loose\.pt, people"):
        artifacts.find_model("nobody")
    (inside.parent / "last.pt").touch()
    with pytest.raises(ArtifactError, match=r"people: 2 files have that name.*best\.pt.*last\.pt"):
        artifacts.find_model("people")
    with pytest.raises(ArtifactError, match="found 2; name the file"):
        artifacts.find_model(str(inside.parent))
    with pytest.raises(ArtifactError, match="found 0"):
        artifacts.find_model(str(tmp_path))


def test_find_engine(engine_home: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"small: no engine there \(engines here: none yet\)"):
        artifacts.find_engine("small")
    first = engine_home / "engines" / "small" / "one"
    first.mkdir(parents=True)
    artifacts.write_manifest(first, _manifest())
    for reference in ("small", "small/one", first, first / "engine.json", str(first) + "/", first.parent):
        assert artifacts.find_engine(reference) == first
    second = first.parent / "two"
    second.mkdir()
    artifacts.write_manifest(second, dataclasses.replace(_manifest(), precision="bf16"))
    for folder in (first, second):
        (folder / "model.bin").write_bytes(b"weights")
    with pytest.raises(ArtifactError, match=r"small: 2 engines are there; give one of: small/one, small/two$"):
        artifacts.find_engine("small")
    with pytest.raises(ArtifactError, match=r"other: no engine there \(engines here: small\); "):
        artifacts.find_engine("other")
    weights = tmp_path / "w.pt"
    weights.touch()
    with pytest.raises(ArtifactError, match="expected an engine, got weights; `visionfast build"):
        artifacts.find_engine(weights)
    assert artifacts.engine_folders() == [first, second]
    (first.parent / ".two.half").mkdir()
    artifacts.write_manifest(first.parent / ".two.half", _manifest())
    assert artifacts.engine_folders() == [first, second]


def test_an_engine_whose_certificate_failed_is_not_taken_by_itself(engine_home: Path) -> None:
    for name, status in (("failed", "failed"), ("passed", "passed")):
        folder = engine_home / "engines" / "small" / name
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"weights")
        artifacts.write_manifest(folder, dataclasses.replace(_manifest(), certificate=Certificate(status)))
    assert artifacts.find_engine("small").name == "passed"
    shutil.rmtree(engine_home / "engines" / "small" / "passed")
    assert artifacts.find_engine("small").name == "failed"


def test_a_model_with_several_engines(engine_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(engine_home)
    for device in ("sm120", "sm75", "sm89"):
        folder = engine_home / "engines" / "small" / device
        folder.mkdir(parents=True)
        (folder / "model.bin").write_bytes(b"weights")
        artifacts.write_manifest(folder, dataclasses.replace(_manifest(), device=device))
    assert [folder.name for folder in artifacts.engine_folders()] == ["sm75", "sm89", "sm120"]
    with pytest.raises(ArtifactError) as some:
        artifacts.find_engine("small", usable=lambda manifest: manifest.device != "sm89")
    assert str(some.value) == ("small: 3 engines are there, 2 of them run here; give one of: small/sm75, small/sm120")
    with pytest.raises(ArtifactError, match="small: 3 engines are there, and none runs here; `visionfast list`"):
        artifacts.find_engine("small", usable=lambda manifest: False)
    only = artifacts.find_engine("small", usable=lambda manifest: manifest.device == "sm89")
    assert only.name == "sm89"


def test_a_model_s_own_folder_is_no_engine_s(
    engine_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match="small: no engine there"):
        artifacts.find_engine("small")
    folder = engine_home / "engines" / "small" / "one"
    folder.mkdir(parents=True)
    artifacts.write_manifest(folder, _manifest())
    assert artifacts.find_engine("small") == artifacts.find_engine("small/") == folder


def test_of_several_engines_the_preferred_one(engine_home: Path, tmp_path: Path) -> None:
    for root in (engine_home / "engines" / "small", tmp_path / "elsewhere"):
        for precision in ("fp32", "bf16"):
            folder = root / precision
            folder.mkdir(parents=True)
            (folder / "model.bin").write_bytes(b"weights")
            artifacts.write_manifest(folder, dataclasses.replace(_manifest(), precision=precision))
    found = artifacts.find_engine("small", prefer=lambda manifest: manifest.precision == "bf16")
    assert found == engine_home / "engines" / "small" / "bf16"
    with pytest.raises(ArtifactError, match=r"small: 2 engines are there; give one of: small/bf16, small/fp32$"):
        artifacts.find_engine("small", prefer=lambda manifest: False)
    # One that does not run here is not taken, however it is preferred.
    found = artifacts.find_engine(
        "small", usable=lambda manifest: manifest.precision == "fp32", prefer=lambda manifest: True
    )
    assert found.name == "fp32"
    with pytest.raises(ArtifactError, match=r"give one of: \S+elsewhere/bf16, \S+elsewhere/fp32$"):
        artifacts.find_engine(tmp_path / "elsewhere")
