"""PyTorch on a device, on a device whose memory is the host's: what it computes is the FP16 program's own answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from recording import RecordingDevice

from visionfast import artifacts
from visionfast.backends import DeviceEngine, get_backend
from visionfast.backends.device_runner import DeviceRunner
from visionfast.backends.torch import TorchEngine
from visionfast.errors import BuildError, IncompatibleEngineError
from visionfast.pipeline import Detector, Segmenter
from visionfast.types import GraphSpec, TensorSpec

_BACKENDS: Any = torch.backends  # its stubs know less than it has


def _opened(folder: Path) -> tuple[Any, Any]:
    manifest = artifacts.read_manifest(folder, verify=True)
    device: Any = RecordingDevice()
    return manifest, get_backend("torch").load_on(device, folder, manifest, manifest.spec.graphs[0])


@pytest.mark.parametrize("task", ["detect", pytest.param("segment", marks=pytest.mark.slow)])
def test_the_fp16_program_answers_as_eager_pytorch_does(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], task: Any
) -> None:
    checkpoint = seeded_checkpoint(task, 3)
    options = {"backend": "torch", "size_hw": (64, 96)}
    half = built_engine(checkpoint, gpu="cuda", precision="fp16", **options)
    full = built_engine(checkpoint, **options)
    manifest, engine = _opened(half)
    assert isinstance(engine, DeviceEngine)
    assert manifest.device == "cuda"
    assert "decode" in manifest.keep_fp32
    assert engine.inputs[0].dtype == "float16"
    assert engine.outputs[0].dtype == "float32"
    images = np.random.default_rng(1).random((1, 3, 64, 96), np.float32)
    reference = artifacts.read_manifest(full)
    with (
        DeviceRunner(engine) as runner,
        get_backend("torch").load(full, reference, reference.spec.graphs[0]) as eager,
    ):
        got = runner.infer({"images": images.astype(np.float16)})
        expected = eager.infer({"images": images})
    for name, values in expected.items():
        scale = np.abs(values).max()
        assert np.abs(got[name].astype(np.float32) - values).max() < 0.01 * scale
    boxes = np.abs(got["predictions"][:, :4] - expected["predictions"][:, :4])
    assert boxes.max() < 1.0  # pixels


@pytest.mark.parametrize("task", [pytest.param("detect", marks=pytest.mark.slow), "segment"])
def test_a_session_on_the_real_program(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], photographs: list[Path], task: Any
) -> None:
    """Bytes to objects: program, kernels and graph, against the same program and NumPy's post-processing."""
    folder = built_engine(seeded_checkpoint(task, 3), backend="torch", gpu="cuda", precision="fp16", size_hw=(64, 96))
    manifest, engine = _opened(folder)
    _, again = _opened(folder)
    kind = Segmenter if task == "segment" else Detector
    options: dict[str, Any] = {"conf": 0.01, "max_det": 5}
    picture = np.asarray(Image.open(photographs[0]).resize((135, 180)))
    with kind(manifest.spec, engine, **options) as session, kind(manifest.spec, DeviceRunner(again), **options) as host:
        (got,), (expected,) = session(picture), host(picture)
        assert np.array_equal(got.xyxy, expected.xyxy)
        assert np.array_equal(got.confidence, expected.confidence)
        assert np.array_equal(got.class_id, expected.class_id)
        assert len(expected) > 0
        raw, host_raw = session.raw(), host.raw()
        assert all(np.array_equal(raw[name], host_raw[name]) for name in host_raw)
        if task == "segment":
            assert (got.mask.dense() != expected.mask.dense()).mean() < 1e-4


@pytest.fixture
def conv() -> Iterator[Any]:
    """PyTorch's settings of FP32, as they are at first."""
    if not hasattr(_BACKENDS.cudnn, "conv"):
        pytest.skip("this torch has one switch for all operations")
    yield _BACKENDS.cudnn.conv
    _BACKENDS.fp32_precision = "none"
    _BACKENDS.cudnn.allow_tf32 = True


@pytest.mark.parametrize("of_all", ["none", "tf32"])
@pytest.mark.parametrize("of_convolutions", ["tf32", "ieee"])
def test_convolutions_in_fp32_are_not_rounded_to_tf32(conv: Any, of_all: str, of_convolutions: str) -> None:
    _BACKENDS.fp32_precision = of_all
    conv.fp32_precision = of_convolutions
    seen = []

    class Module(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(conv.fp32_precision)
            return images * 2

    graph = GraphSpec(
        "model", (TensorSpec("x", (1, 1, 2, 2), "float32", "NCHW"),), (TensorSpec("y", (1, 1, 2, 2), "float32"),)
    )
    device: Any = RecordingDevice()
    with DeviceRunner(TorchEngine(Module(), graph, device)) as runner:
        runner.infer({"x": np.ones((1, 1, 2, 2), np.float32)})
    assert seen == ["ieee"]
    assert conv.fp32_precision == of_convolutions


def test_threads_load_at_the_same_time(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    """`torch.export.load` is for one thread at a time, and sessions are opened by the threads that use them."""
    folder = built_engine(
        seeded_checkpoint("detect", 3), backend="torch", gpu="cuda", precision="fp16", size_hw=(64, 96)
    )
    filters = list(warnings.filters)
    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(lambda _: _opened(folder), range(6)))
    assert len(opened) == 6
    assert list(warnings.filters) == filters


def test_what_it_does_not_build_or_load(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(BuildError, match="precision fp16: backend torch builds fp32 for the CPU"):
        built_engine(seeded_checkpoint("detect", 3), backend="torch", precision="fp16", size_hw=(64, 96))
    folder = built_engine(seeded_checkpoint("detect", 3), backend="torch", size_hw=(64, 96))
    with pytest.raises(IncompatibleEngineError, match="the engine is for the cpu; build it with"):
        _opened(folder)
