"""TensorRT-RTX builds real engines for a GPU that is not here; running them says what would be needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from visionfast import artifacts, machine
from visionfast.backends import get_backend
from visionfast.build import build
from visionfast.errors import BackendUnavailableError, IncompatibleEngineError, OptionError
from visionfast.pipeline import open_engine, runs_here

rtx = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)


@rtx
def test_builds_ahead_of_time(
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
    engine_home: Path,
) -> None:
    checkpoint = seeded_checkpoint("detect", 3)
    options = {"backend": "tensorrt-rtx", "gpu": "sm89", "precision": "fp16"}
    folder = built_engine(checkpoint, **options)
    manifest = artifacts.read_manifest(folder, verify=True)
    engine = folder / manifest.files["model"]
    assert engine.stat().st_size > 1 << 20
    assert folder.name == "tensorrt-rtx-fp16-sm89-320x320-b1"
    assert (manifest.backend, manifest.precision, manifest.device) == ("tensorrt-rtx", "fp16", "sm89")
    assert manifest.runtime_version == get_backend("tensorrt-rtx").availability().version
    assert "decode" in manifest.keep_fp32
    graph = manifest.spec.graphs[0]
    assert graph.inputs[0].dtype == "float16"
    assert graph.outputs[0].dtype == "float32"
    assert manifest.layers["float16"] > 10 * manifest.layers["float32"] > 0
    if not machine.gpus():
        assert manifest.certificate.status == "not yet run on a device"
        assert not manifest.certificate.measures

    again, other = build(checkpoint, **options)  # type: ignore[arg-type]
    assert (again / "model.engine").read_bytes() == engine.read_bytes()
    assert other.onnx_sha256 == manifest.onnx_sha256


@rtx
def test_fp32_is_larger(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> None:
    checkpoint = seeded_checkpoint("segment", 2)
    half, full = (built_engine(checkpoint, backend="tensorrt-rtx", gpu="sm86", precision=p) for p in ("fp16", "fp32"))
    assert (full / "model.engine").stat().st_size > 1.5 * (half / "model.engine").stat().st_size
    assert artifacts.read_manifest(full).keep_fp32 == ()


@rtx
@pytest.mark.skipif(bool(machine.gpus()), reason="this machine has a GPU")
def test_opening_says_what_is_needed(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> None:
    folder = built_engine(seeded_checkpoint("detect", 3), backend="tensorrt-rtx", gpu="sm89", precision="fp16")
    with pytest.raises(BackendUnavailableError, match=r"needs an NVIDIA GPU \(sm89\) and its driver") as caught:
        open_engine(folder)
    assert "\n" not in str(caught.value)


@rtx
@pytest.mark.parametrize("gpu", ["sm90", "sm1", "ada", "", "SM89", "../x"])
def test_unknown_gpus(seeded_checkpoint: Callable[..., Path], engine_home: Path, gpu: str) -> None:
    with pytest.raises(OptionError, match=r"TensorRT-RTX compiles for sm75, .*sm89"):
        build(seeded_checkpoint("detect", 3), backend="tensorrt-rtx", gpu=gpu)
    assert list(engine_home.rglob("*")) == []


@rtx
@pytest.mark.skipif(bool(machine.gpus()), reason="this machine has a GPU")
def test_a_gpu_has_to_be_named(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"name one, e.g. `--gpu sm89`"):
        build(seeded_checkpoint("detect", 3), backend="tensorrt-rtx")


def test_openvino_has_no_gpu(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    with pytest.raises(OptionError, match="backend openvino compiles for the CPU; leave --gpu out"):
        build(seeded_checkpoint("detect", 3), backend="openvino", gpu="sm89")


@pytest.mark.skipif(bool(machine.gpus()), reason="this machine has a GPU")
def test_tensorrt_without_a_gpu(seeded_checkpoint: Callable[..., Path], engine_home: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"tensorrt: .*(pip install 'visionfast\[tensorrt\]'|NVIDIA GPU)"):
        build(seeded_checkpoint("detect", 3), backend="tensorrt")
    with pytest.raises(BackendUnavailableError, match="`--backend tensorrt-rtx --gpu sm89` builds ahead of time"):
        get_backend("tensorrt").resolve_device(None)
    assert list(engine_home.rglob("*")) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_engines_are_for_a_gpu_generation(copied_engine: Path, backend: str, device: str) -> None:
    manifest = dataclasses.replace(artifacts.read_manifest(copied_engine), backend=backend, device=device)
    artifacts.write_manifest(copied_engine, manifest)
    with pytest.raises(IncompatibleEngineError, match=f"device {device}: expected a GPU generation such as sm89 for"):
        get_backend(backend).check_runnable(manifest)
    assert not runs_here(manifest)
    with pytest.raises((IncompatibleEngineError, OptionError), match=f"device {device}: expected a GPU generation"):
        open_engine(copied_engine)
