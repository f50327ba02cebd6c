"""Every mismatch between an engine and a machine names both sides and what mends it, from facts alone."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from visionfast import machine
from visionfast.backends.compatibility import MachineFacts, build_command, check_engine, cuda_major, machine_facts
from visionfast.errors import BackendError, BackendUnavailableError, IncompatibleEngineError
from visionfast.machine import Gpu
from visionfast.types import Certificate, EngineManifest, GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

_GRAPH = GraphSpec("model", (TensorSpec("images", (1, 3, 640, 640), "float16"),), (TensorSpec("o", (1,), "float32"),))
_SPEC = ModelSpec("yolov8s", "yolov8", "yolov8s", "detect", (_GRAPH,), PreprocessSpec((640, 640)), ("a",), (8,))
_MANIFEST = EngineManifest(
    spec=_SPEC,
    backend="tensorrt-rtx",
    precision="fp16",
    device="sm89",
    runtime_version="1.7.1.116",
    files={"model": "model.engine"},
    sha256={"model.engine": ""},
    onnx_sha256={},
    weights_sha256="",
    keep_fp32=("decode",),
    certificate=Certificate("not yet run on a device"),
    created="",
    visionfast_version="1",
    platform="linux-x86_64",
)
_ADA, _BLACKWELL = Gpu(0, "NVIDIA L4", "sm89"), Gpu(1, "NVIDIA RTX 5090", "sm120")
_HERE = MachineFacts((_ADA, _BLACKWELL), 13010, "linux-x86_64", "1.7.1.116", 13)


def _with(thing: Any, **changes: Any) -> Any:
    return dataclasses.replace(thing, **changes)


@pytest.mark.parametrize(
    ("manifest", "here", "index", "runs_on"),
    [
        (_MANIFEST, _HERE, None, 0),
        (_MANIFEST, _HERE, 0, 0),
        (_with(_MANIFEST, device="sm120"), _HERE, None, 1),  # the first that it was compiled for
        (_with(_MANIFEST, device="sm120"), _HERE, 1, 1),
        (_with(_MANIFEST, platform=""), _with(_HERE, platform="windows-x86_64"), None, 0),  # an older manifest
        (_MANIFEST, _with(_HERE, runtime_cuda=0, driver_version=12040), None, 0),  # the package does not say
        (_MANIFEST, _with(_HERE, driver_version=13000), None, 0),
        # a torch engine is bound to no release, generation or system
        (_with(_MANIFEST, backend="torch", device="cuda", platform="windows-x86_64"), _HERE, None, 0),
        (_with(_MANIFEST, backend="torch", device="cuda", runtime_version="2.6"), _HERE, 1, 1),
        (_with(_MANIFEST, backend="openvino", device="cpu"), MachineFacts((), 0, "", ""), None, None),
    ],
)
def test_what_runs(manifest: EngineManifest, here: MachineFacts, index: int | None, runs_on: int | None) -> None:
    assert check_engine(manifest, here=here, device_index=index) == runs_on


@pytest.mark.parametrize(
    ("manifest", "here", "index", "error", "says"),
    [
        (
            _MANIFEST,
            _with(_HERE, gpus=(), driver_version=0),
            None,
            BackendUnavailableError,
            "tensorrt-rtx: the engine needs an NVIDIA GPU (sm89) and its driver; this machine has none",
        ),
        (
            _MANIFEST,
            _with(_HERE, gpus=()),
            0,
            BackendUnavailableError,
            "its driver serves CUDA 13.1 and shows no GPU (CUDA_VISIBLE_DEVICES?)",
        ),
        (
            _MANIFEST,
            _with(_HERE, runtime_version=""),
            None,
            BackendUnavailableError,
            "needs tensorrt-rtx 1.7.1.116, which is not installed; `pip install 'visionfast[tensorrt-rtx]'`",
        ),
        (
            _with(_MANIFEST, backend="torch", device="cuda"),
            _with(_HERE, runtime_version=""),
            None,
            BackendUnavailableError,
            "`pip install 'visionfast[build]'`",
        ),
        (
            _MANIFEST,
            _with(_HERE, platform="linux-aarch64"),
            None,
            IncompatibleEngineError,
            "platform: the engine was built on linux-x86_64, this machine is linux-aarch64; build it here: "
            "`visionfast build --model yolov8s --backend tensorrt-rtx --gpu sm89 --precision fp16 --imgsz 640`",
        ),
        (
            _MANIFEST,
            _with(_HERE, runtime_version="1.8.0"),
            None,
            IncompatibleEngineError,
            "tensorrt-rtx: the engine needs exactly 1.7.1.116, here is 1.8.0; build it again: "
            "`visionfast build --model yolov8s --backend tensorrt-rtx --gpu sm89 --precision fp16 --imgsz 640`",
        ),
        (
            _with(_MANIFEST, backend="tensorrt"),
            _with(_HERE, runtime_version="11.0"),
            None,
            IncompatibleEngineError,
            "`visionfast build --model yolov8s --backend tensorrt --precision fp16 --imgsz 640`",
        ),
        (
            _MANIFEST,
            _with(_HERE, driver_version=12040),
            None,
            BackendUnavailableError,
            "driver: tensorrt-rtx 1.7.1.116 needs one for CUDA 13.0 or newer, this machine's serves 12.4; install an "
            "NVIDIA driver of the 580 series or newer",
        ),
        (
            _MANIFEST,
            _with(_HERE, runtime_cuda=14),
            None,
            BackendUnavailableError,
            "serves 13.1; install an NVIDIA driver that serves CUDA 14",
        ),
        (
            _MANIFEST,
            _HERE,
            1,
            IncompatibleEngineError,
            "device: the engine is for sm89, here is cuda:1 sm120 (NVIDIA RTX 5090); build one for it: "
            "`visionfast build --model yolov8s --backend tensorrt-rtx --gpu sm120 --precision fp16 --imgsz 640`",
        ),
        (
            _with(_MANIFEST, device="sm86"),
            _HERE,
            None,
            IncompatibleEngineError,
            "the engine is for sm86, here is cuda:0 sm89 (NVIDIA L4), cuda:1 sm120 (NVIDIA RTX 5090); build one",
        ),
        (
            _MANIFEST,
            _HERE,
            2,
            BackendUnavailableError,
            "cuda:2: this machine has cuda:0 sm89 (NVIDIA L4), cuda:1 sm120 (NVIDIA RTX 5090)",
        ),
        (_MANIFEST, _HERE, -1, BackendUnavailableError, "cuda:-1: this machine has"),
    ],
)
def test_every_mismatch_names_both_sides(
    manifest: EngineManifest, here: MachineFacts, index: int | None, error: type[BackendError], says: str
) -> None:
    with pytest.raises(error) as caught:
        check_engine(manifest, here=here, device_index=index)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    manifest=st.builds(
        lambda **changes: _with(_MANIFEST, **changes),
        backend=st.sampled_from(["tensorrt", "tensorrt-rtx", "torch"]),
        device=st.sampled_from(["sm75", "sm89", "sm120", "cuda", "cpu", ""]),
        runtime_version=st.sampled_from(["", "1.7.1.116", "9"]),
        platform=st.sampled_from(["", "linux-x86_64", "windows-x86_64"]),
    ),
    here=st.builds(
        MachineFacts,
        st.lists(st.sampled_from(["sm75", "sm89", "sm120"]), max_size=3).map(
            lambda sms: tuple(Gpu(i, "GPU", sm) for i, sm in enumerate(sms))
        ),
        st.sampled_from([0, 12080, 13000, 13010]),
        st.sampled_from(["linux-x86_64", "linux-aarch64"]),
        st.sampled_from(["", "1.7.1.116"]),
        st.sampled_from([0, 12, 13]),
    ),
    index=st.none() | st.integers(-1, 3),
)
def test_it_either_names_a_gpu_that_fits_or_gives_a_reason(
    manifest: EngineManifest, here: MachineFacts, index: int | None
) -> None:
    try:
        runs_on = check_engine(manifest, here=here, device_index=index)
    except (BackendUnavailableError, IncompatibleEngineError):
        assert manifest.device != "cpu"
        return
    if manifest.device == "cpu":
        assert runs_on is None
        return
    assert index in (None, runs_on)
    assert manifest.device in ("cuda", here.gpus[runs_on].sm)
    assert here.driver_version >= 1000 * here.runtime_cuda
    if manifest.backend != "torch":
        assert manifest.runtime_version == here.runtime_version
        assert manifest.platform in ("", here.platform)


@pytest.mark.parametrize(
    ("manifest", "gpu", "command"),
    [
        (
            _with(_MANIFEST, spec=_with(_SPEC, preprocess=PreprocessSpec((384, 640)))),
            None,
            "visionfast build --model yolov8s --backend tensorrt-rtx --gpu sm89 --precision fp16 --imgsz 384x640",
        ),
        (
            _with(
                _MANIFEST,
                backend="openvino",
                device="cpu",
                precision="fp32",
                spec=_with(
                    _SPEC, graphs=(_with(_GRAPH, inputs=(TensorSpec("images", (8, 640, 640, 3), "uint8", "NHWC"),)),)
                ),
            ),
            None,
            "visionfast build --model yolov8s --backend openvino --precision fp32 --imgsz 640 --batch 8",
        ),
        (
            _with(_MANIFEST, backend="torch", device="cuda"),
            None,
            "visionfast build --model yolov8s --backend torch --gpu cuda --precision fp16 --imgsz 640",
        ),
    ],
)
def test_build_command(manifest: EngineManifest, gpu: str | None, command: str) -> None:
    assert build_command(manifest, gpu=gpu) == command
    # it is a command that there is
    from visionfast.cli import app

    verb: Any = get_command(app).commands["build"]  # type: ignore[attr-defined]
    verb.make_context("build", shlex.split(command)[2:])


@pytest.mark.parametrize(
    ("package", "major"),
    [("tensorrt-rtx-cu13", 13), ("tensorrt-cu12", 12), ("tensorrt", 0), ("nvidia-dali-cuda130", 0), ("x-cu130", 0)],
)
def test_cuda_major(package: str, major: int) -> None:
    assert cuda_major(package) == major


def test_the_facts_of_this_machine() -> None:
    facts = machine_facts("1.7", 13)
    assert facts.gpus == machine.gpus()
    assert (facts.runtime_version, facts.runtime_cuda) == ("1.7", 13)
    assert bool(facts.gpus) <= bool(facts.driver_version)
    system, _, architecture = facts.platform.partition("-")
    assert system in ("linux", "darwin", "windows")
    assert architecture
    assert facts.platform == facts.platform.lower()


@pytest.mark.parametrize(("version", "words"), [(13010, "13.1"), (12040, "12.4"), (12080, "12.8"), (13000, "13.0")])
def test_cuda_release(version: int, words: str) -> None:
    assert machine.cuda_release(version) == words


@pytest.mark.parametrize(
    ("system", "architecture", "name"),
    [
        ("Linux", "x86_64", "linux-x86_64"),
        ("Windows", "AMD64", "windows-x86_64"),
        ("Darwin", "arm64", "darwin-aarch64"),
        ("Linux", "aarch64", "linux-aarch64"),
    ],
)
def test_platforms_have_one_spelling(
    monkeypatch: pytest.MonkeyPatch, system: str, architecture: str, name: str
) -> None:
    import platform

    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    assert machine.platform_name() == name
