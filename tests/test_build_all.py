"""Several GPU generations in one go: one reading, one export, an engine each, and one that fails fails alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from visionfast import artifacts, machine
from visionfast.backends import CompileRequest, get_backend
from visionfast.backends.tensorrt import TensorRtRtxBackend
from visionfast.build import build, build_all
from visionfast.errors import ArtifactError, BuildError, CheckpointError, OptionError

pytestmark = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)
_GPUS = ("sm75", "sm86", "sm89", "sm120")


def test_an_engine_for_each(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    checkpoint = seeded_checkpoint("segment", 2)
    stages: list[str] = []
    built = build_all(checkpoint, gpus=[*_GPUS, "sm86"], size_hw=(64, 64), progress=stages.append)
    assert [one.device for one in built] == list(_GPUS)
    assert [one.error for one in built] == [None] * 4
    manifests = [one.manifest for one in built if one.manifest is not None]
    folders = [one.folder for one in built if one.folder is not None]
    assert [folder.name for folder in folders] == [f"tensorrt-rtx-fp16-{gpu}-64x64-b1" for gpu in _GPUS]
    assert [artifacts.read_manifest(folder, verify=True) for folder in folders] == manifests
    assert {m.onnx_sha256["model"] for m in manifests} == {manifests[0].onnx_sha256["model"]}
    assert len({m.sha256["model.engine"] for m in manifests}) == 4
    assert {m.platform for m in manifests} == {machine.platform_name()}
    assert stages.count("reading the checkpoint") == stages.count("exporting model") == 1
    assert [s for s in stages if s.startswith("compiling")] == [
        f"compiling model with tensorrt-rtx for {gpu}" for gpu in _GPUS
    ]
    if not machine.gpus():
        assert {m.certificate.status for m in manifests} == {"not yet run on a device"}
        assert not [stage for stage in stages if stage.startswith("certifying")]
    # One at a time is the same; not its bytes: TensorRT-RTX 1.7 writes two outputs in an order that changes.
    _, alone = build(checkpoint, gpu="sm89", size_hw=(64, 64))
    assert (alone.spec, alone.onnx_sha256) == (manifests[2].spec, manifests[2].onnx_sha256)


class _FailsForAmpere(TensorRtRtxBackend):
    def compile(self, request: CompileRequest) -> Any:
        if request.device == "sm86":
            (request.folder / "model.engine").write_text("half")
            raise BuildError("tensorrt-rtx: no engine for sm86: no")
        return super().compile(request)


def test_one_that_fails_fails_alone(
    seeded_checkpoint: Callable[..., Path], engine_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visionfast.backends.tensorrt.TensorRtRtxBackend", _FailsForAmpere)
    built = build_all(seeded_checkpoint("detect", 3), gpus=["sm86", "sm75"], size_hw=(64, 64))
    bad, good = built
    assert (bad.device, bad.folder, bad.manifest) == ("sm86", None, None)
    assert str(bad.error) == "tensorrt-rtx: no engine for sm86: no"
    assert good.error is None
    assert good.folder is not None
    assert sorted(p.name for p in good.folder.parent.iterdir()) == [good.folder.name]


@pytest.mark.parametrize("gpus", [["sm89", "sm90"], ["sm90"], ["sm89", ""]])
def test_a_name_that_is_none_stops_all_before_anything_is_built(
    seeded_checkpoint: Callable[..., Path], engine_home: Path, gpus: list[str]
) -> None:
    with pytest.raises(OptionError, match=r"TensorRT-RTX compiles for sm75, "):
        build_all(seeded_checkpoint("detect", 3), gpus=gpus, size_hw=(64, 64), backend="tensorrt-rtx")
    assert list(engine_home.rglob("*")) == []


def test_none_at_all(seeded_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="gpus: expected at least one GPU generation, such as sm89, got none"):
        build_all(seeded_checkpoint("detect", 3), gpus=[])
    with pytest.raises(CheckpointError):
        build_all(tmp_path / "none.pt", gpus=["sm75", "sm89"])


def test_an_interruption_leaves_those_that_are_done(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    def progress(stage: str) -> None:
        if stage.endswith("for sm89"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_all(seeded_checkpoint("detect", 3), gpus=["sm75", "sm89"], size_hw=(64, 64), progress=progress)
    (folder,) = artifacts.engine_folders()
    assert "sm75" in folder.name
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_folder_in_the_way_is_one_target_s_failure(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    checkpoint = seeded_checkpoint("detect", 3)
    (engine_home / "engines").mkdir()
    (engine_home / "engines" / checkpoint.stem).write_text("a file")
    built = build_all(checkpoint, gpus=["sm75", "sm89"], size_hw=(64, 64))
    assert [type(one.error) for one in built] == [ArtifactError, ArtifactError]


def test_from_the_command_line(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    checkpoint = seeded_checkpoint("detect", 3)

    def visionfast(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "visionfast.cli", *arguments]
        environment = os.environ | {"VISIONFAST_HOME": str(engine_home)}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=engine_home, check=False, timeout=300
        )

    done = visionfast("build", "--model", str(checkpoint), "--imgsz", "64", "--gpu", "sm75", "--gpu", "sm120")
    assert done.returncode == 0, done.stderr
    folders = [line for line in done.stdout.splitlines() if line.startswith(str(engine_home))]
    assert folders == [str(p) for p in sorted(artifacts.engine_folders(), key=lambda p: "sm120" in p.name)]
    assert len(folders) == 2
    listed = visionfast("list").stdout
    assert "tensorrt-rtx-fp16-sm75-64x64-b1" in listed
    shown = visionfast("show", folders[0]).stdout
    assert machine.platform_name() in shown
    if not machine.gpus():
        assert "not yet run on a device" in done.stdout
        assert "needs an NVIDIA GPU (sm75)" in shown
        certified = visionfast("certify", folders[0], "--model", str(checkpoint))
        assert certified.returncode == 1
        assert certified.stderr.splitlines()[-1].startswith("visionfast: tensorrt-rtx: the engine needs an NVIDIA GPU")
