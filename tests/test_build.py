"""A build leaves a whole engine or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from visionfast import artifacts, machine
from visionfast.backends import get_backend
from visionfast.backends.openvino import OpenVinoBackend
from visionfast.build import best_backend, build
from visionfast.errors import (
    ArtifactError,
    BackendUnavailableError,
    BuildError,
    CertificateError,
    CheckpointError,
    OptionError,
    UnsupportedModelError,
    VisionfastError,
)

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'visionfast[openvino]'")


def _files(home: Path) -> list[Path]:
    return [p for p in home.rglob("*") if not p.is_dir()]


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_builds_and_certifies(task: str, seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    checkpoint = seeded_checkpoint(task, 3)
    before = checkpoint.read_bytes()
    stages: list[str] = []
    folder, manifest = build(checkpoint, backend="openvino", size_hw=(64, 96), batch=2, progress=stages.append)
    assert folder == engine_home / "engines" / f"yolov8n-{task}-3" / "openvino-fp32-cpu-64x96-b2"
    assert artifacts.read_manifest(folder, verify=True) == manifest
    assert manifest.certificate.status == "passed"
    assert manifest.certificate.measures["max_score_difference"] < 1e-3
    assert [entry["file"] for entry in manifest.certificate.images] == ["bus.jpg", "zidane.jpg"]
    assert manifest.weights_sha256 == artifacts.sha256_file(checkpoint)
    assert checkpoint.read_bytes() == before
    assert manifest.spec.batch == 2
    assert stages == [
        "reading the checkpoint",
        "exporting model",
        "compiling model with openvino",
        "certifying",
    ]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_builds_with_what_the_checkpoint_says(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    manifest = artifacts.read_manifest(built_engine(seeded_checkpoint("detect", 3)))
    assert manifest.spec.preprocess.size_hw == (320, 320)
    assert manifest.spec.class_names == ("kind 0", "kind 1", "kind 2")
    assert (manifest.spec.architecture, manifest.spec.strides) == ("yolov8n", (8, 16, 32))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), BuildError("no"), MemoryError(), OSError(28, "full")])
@pytest.mark.parametrize("replaces", [False, True])
def test_an_interrupted_build_leaves_nothing(
    seeded_checkpoint: Callable[..., Path],
    engine_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    interruption: BaseException,
    replaces: bool,
) -> None:
    checkpoint = seeded_checkpoint("detect", 3)
    options: dict[str, Any] = {"backend": "openvino", "size_hw": (64, 64)}
    old = engine_home / "engines" / "yolov8n-detect-3" / "openvino-fp32-cpu-64x64-b1" / "old"
    if replaces:
        old.parent.mkdir(parents=True)
        old.touch()

    def interrupted(self: Any, request: Any) -> None:
        (request.folder / "model.xml").write_text("half")
        raise interruption

    monkeypatch.setattr(OpenVinoBackend, "compile", interrupted)
    expected = ArtifactError if isinstance(interruption, OSError) else type(interruption)
    with pytest.raises(expected):
        build(checkpoint, **options)
    assert _files(engine_home) == ([old] if replaces else [])
    assert artifacts.engine_folders() == []


def test_a_build_that_cannot_be_certified_leaves_nothing(
    seeded_checkpoint: Callable[..., Path], engine_home: Path, tmp_path: Path
) -> None:
    text = tmp_path / "a.jpg"
    text.write_text("no image")
    with pytest.raises(CertificateError, match="none of the 1 images can be decoded"):
        build(seeded_checkpoint("detect", 3), backend="openvino", size_hw=(64, 64), images=[text])
    assert _files(engine_home) == []


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"size_hw": (100, 64)}, OptionError, "imgsz: expected multiples of 32.*the nearest are 96x64 and 128x64"),
        ({"size_hw": (0, 64)}, OptionError, "imgsz"),
        ({"batch": 0}, OptionError, "batch: expected a whole number from 1 to 1024, got 0"),
        ({"batch": -1}, OptionError, "batch: expected a whole number from 1 to 1024, got -1"),
        ({"batch": True}, OptionError, "batch: expected a whole number from 1 to 1024, got True"),
        ({"backend": "onnx"}, OptionError, "backend 'onnx': expected one of"),
        ({"precision": "int8"}, OptionError, "precision int8: openvino builds"),
        (
            {"keep_fp32": ["blocks.4"]},
            OptionError,
            "keep_fp32 blocks.4: expected an FP16 graph .* got fp32 with openvino",
        ),
        ({"name": "../x"}, OptionError, r"name '\.\./x': expected letters"),
        ({"name": ""}, OptionError, "name '': expected letters"),
        ({"name": "a\nb"}, OptionError, r"name 'a\\nb': expected letters"),
    ],
)
def test_wrong_options(
    seeded_checkpoint: Callable[..., Path],
    engine_home: Path,
    options: dict[str, Any],
    error: type[VisionfastError],
    says: str,
) -> None:
    with pytest.raises(error, match=says) as caught:
        build(seeded_checkpoint("detect", 3), **({"backend": "openvino"} | options))
    assert "\n" not in str(caught.value)
    assert _files(engine_home) == []


def test_a_runtime_that_chooses_precisions_itself(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    if "bf16" not in get_backend("openvino").availability().precisions:
        pytest.skip("this processor does not compute BF16")
    with pytest.raises(
        OptionError, match="keep_fp32: openvino chooses each layer's precision itself; use tensorrt-rtx"
    ):
        build(seeded_checkpoint("detect", 3), backend="openvino", precision="bf16", keep_fp32=["blocks.4"])
    assert _files(engine_home) == []


def test_what_is_not_a_checkpoint(engine_home: Path, tmp_path: Path) -> None:
    import torch

    text, other = tmp_path / "text.pt", tmp_path / "other.pt"
    text.write_text("weights")
    torch.save({"fc.weight": torch.zeros(2, 2)}, other)
    for path, error in [
        (text, CheckpointError),
        (tmp_path / "none.pt", CheckpointError),
        (other, UnsupportedModelError),
    ]:
        with pytest.raises(error) as caught:
            build(path, backend="openvino")
        assert "\n" not in str(caught.value)
    assert _files(engine_home) == []


def test_the_best_backend_can_do_both() -> None:
    state = best_backend().availability()
    assert state.can_build
    assert state.can_run


def test_engine_json_is_json_that_everything_reads(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    text = (built_engine(seeded_checkpoint("segment", 2)) / "engine.json").read_text()
    json.loads(text, parse_constant=refuse)


def test_without_the_build_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "onnx" else found(name, *a))
    with pytest.raises(BackendUnavailableError, match=r"building needs onnx; `pip install 'visionfast\[build\]'`"):
        build(tmp_path / "any.pt")


@pytest.mark.skipif(not get_backend("tensorrt-rtx").availability().can_build, reason="TensorRT-RTX is not installed")
@pytest.mark.parametrize(
    ("sm", "torch_sees_it", "best"),
    [
        ("sm89", True, "tensorrt-rtx"),
        ("sm90", True, "torch"),  # TensorRT-RTX does not know Hopper
        ("sm90", False, "openvino"),
    ],
)
def test_the_best_backend_for_a_gpu(monkeypatch: pytest.MonkeyPatch, sm: str, torch_sees_it: bool, best: str) -> None:
    import torch

    if get_backend("tensorrt").availability().version:
        pytest.skip("TensorRT is installed")
    monkeypatch.setattr(machine, "gpus", lambda: (machine.Gpu(0, "a GPU", sm),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_sees_it)
    assert best_backend().name == best
