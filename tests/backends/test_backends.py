"""What every runtime has in common, and the eager one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from visionfast import artifacts
from visionfast.backends import BACKENDS, check_feeds, get_backend
from visionfast.backends.fake import FakeRunner
from visionfast.errors import BackendError, IncompatibleEngineError, OptionError, ShapeError
from visionfast.types import GraphSpec, Runner, TensorSpec

_GRAPH = GraphSpec("model", (TensorSpec("images", (1, 4), "uint8"),), (TensorSpec("out", (2,), "float32"),))


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_says_what_it_can(name: str) -> None:
    backend = get_backend(name)
    assert backend.name == name
    state = backend.availability()
    assert bool(state.reason) != (state.can_build and state.can_run)
    assert "\n" not in state.reason
    if state.can_build:
        assert state.version
        for device in ("cpu", "cuda", "sm89"):
            assert backend.default_precision(device) in state.precisions


def test_unknown_backend() -> None:
    with pytest.raises(OptionError, match="backend 'onnx': expected one of openvino, tensorrt, tensorrt-rtx, torch"):
        get_backend("onnx")


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({}, "expected the inputs images, got none"),
        ({"image": np.zeros((1, 4), np.uint8)}, "expected the inputs images, got image"),
        ({"images": np.zeros((1, 4), np.uint8), "more": np.zeros(1)}, "got images, more"),
        ({"images": np.zeros((2, 4), np.uint8)}, r"images: expected \(1, 4\) uint8, got \(2, 4\) uint8"),
        ({"images": np.zeros((1, 4), np.float32)}, r"images: expected \(1, 4\) uint8, got \(1, 4\) float32"),
    ],
)
def test_feeds_are_checked(feeds: dict[str, np.ndarray], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        check_feeds(_GRAPH.inputs, feeds)
    with pytest.raises(ShapeError, match=says), FakeRunner(_GRAPH) as runner:
        runner.infer(feeds)


def test_the_fake_overwrites_what_it_lent() -> None:
    with FakeRunner(_GRAPH, lambda feeds: {"out": feeds["images"][0, :2]}) as runner:
        assert isinstance(runner, Runner)
        feed = np.array([[1, 2, 3, 4]], np.uint8)
        lent, own = runner.infer({"images": feed}, copy=False)["out"], runner.infer({"images": feed})["out"]
        runner.infer({"images": feed * 2})
        assert lent.tolist() == [2, 4]
        assert own.tolist() == [1, 2]


def test_torch_engine(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], engine_home: Path
) -> None:
    folder = built_engine(seeded_checkpoint("detect", 3), backend="torch", size_hw=(64, 96))
    manifest = artifacts.read_manifest(folder, verify=True)
    graph = manifest.spec.graphs[0]
    assert manifest.certificate.status == "passed"
    assert graph.inputs == (TensorSpec("images", (1, 3, 64, 96), "float32", "NCHW"),)
    backend = get_backend("torch")
    images = np.random.default_rng(0).random((1, 3, 64, 96), np.float32)
    with backend.load(folder, manifest, graph, threads=1) as runner:
        predictions = runner.infer({"images": images})["predictions"]
        assert predictions.shape == graph.outputs[0].shape
        with pytest.raises(ShapeError):
            runner.infer({"images": images[0]})
    with pytest.raises(IncompatibleEngineError, match="device sm89: expected cpu or cuda"):
        backend.load(folder, dataclasses.replace(manifest, device="sm89"), graph)
    (engine_home / "model.pt2").write_bytes((folder / "model.pt2").read_bytes()[:1000])
    with pytest.raises(BackendError, match="torch cannot load it") as caught:
        backend.load(engine_home, manifest, graph)
    assert "\n" not in str(caught.value)
    assert (backend.resolve_device("sm89"), backend.resolve_device("cuda")) == ("cuda", "cuda")
    with pytest.raises(OptionError, match="--gpu ada: expected cuda"):
        backend.resolve_device("ada")
