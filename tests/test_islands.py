"""A build that fails in FP16 finds what drifts, keeps it in FP32, and says so: with a real network that is made to
overflow, and a backend that computes in FP16 on this machine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from half_backend import COMPILED, HalfBackend
from torch import nn

from visionfast import artifacts, machine
from visionfast.backends import BACKENDS, Compiled, CompileRequest
from visionfast.backends.torch import TorchRunner
from visionfast.build import build
from visionfast.checkpoint import open_checkpoint
from visionfast.drift import measure_drift
from visionfast.errors import BuildError
from visionfast.families import identify
from visionfast.precision import Drift
from visionfast.types import EngineManifest, GraphSpec, Runner

pytest.importorskip("ultralytics", reason="networks are made with ultralytics: pip install 'visionfast[build]'")


class RefusingBackend(HalfBackend):
    """A compiler that does not take one of the modules in FP32."""

    name = "half-refusing"

    def compile(self, request: CompileRequest) -> Compiled:
        if "blocks.4.m.0" in request.keep_fp32:
            raise BuildError("half: no kernel for blocks.4.m.0")
        return super().compile(request)


class WrongBackend(HalfBackend):
    """Wrong in every precision."""

    name = "half-wrong"

    def load(self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, threads: int | None = None) -> Runner:
        runner = super().load(folder, manifest, graph)

        class Wrong(TorchRunner):
            def infer(self, feeds: Any, *, copy: bool = True) -> Any:
                outputs = runner.infer(feeds)
                outputs["predictions"][:, 4:] *= 0.5
                return outputs

        return Wrong(None, graph)


@pytest.fixture(autouse=True)
def half_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind in (HalfBackend, RefusingBackend, WrongBackend):
        monkeypatch.setitem(BACKENDS, kind.name, f"{__name__}:{kind.__name__}")
    monkeypatch.setattr(machine, "usable_cpus", lambda: 1)  # tiny tensors: more threads only wait for each other
    yield
    COMPILED.clear()


def _overflow(bottleneck: Any) -> None:
    """Between its two convolutions the values are 30,000 times as large; what comes out is about what it was."""
    bottleneck.cv1.bn.weight *= 3e4
    bottleneck.cv1.bn.bias *= 3e4
    bottleneck.cv2.conv.weight /= 3e4


def _overflow_between(block: Any, readers: list[Any]) -> None:
    """What the block hands on is 30,000 times as large, and its readers take that back."""
    block.bn.weight *= 3e4
    block.bn.bias *= 3e4
    for weight in readers:
        weight /= 3e4


def _drown(branch: Any) -> None:
    """A constant of 30,000 on every channel, which the last convolution takes off again: FP16 has steps of 16 there."""
    branch[1].bn.bias += 3e4
    branch[2].bias -= 3e4 * branch[2].weight.sum((1, 2, 3))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made("overflow 4", "drown 0")`: a checkpoint that was changed so."""
    from ultralytics.nn.tasks import DetectionModel

    def make(*changes: str) -> Path:
        torch.manual_seed(0)
        model = DetectionModel("yolov8n.yaml", nc=2, verbose=False)
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
            norm.momentum = None  # the average of what it sees: every layer's values get to be about 1
        with torch.no_grad():
            model.train()(torch.rand(4, 3, 64, 64))
            model.eval()
            for branch in model.model[-1].cv3:
                branch[-1].weight *= 0.1  # an untrained network doubles an error in every block
                branch[-1].bias.fill_(-2.0)
            for change in changes:
                what, where = change.split()
                if what == "between":  # block 16 has one reader, 18, which takes it as its first 64 channels
                    _overflow_between(model.model[16], [model.model[18].cv1.conv.weight[:, :64]])
                elif what == "overflow":
                    _overflow(model.model[int(where)].m[0])
                else:
                    _drown(model.model[-1].cv3[int(where)])
        path = tmp_path_factory.mktemp("weights") / "net.pt"
        torch.save({"model": model, "train_args": {"imgsz": 64}}, path)
        return path

    return make


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory, photographs: list[Path]) -> Path:
    """A photograph that is decoded in no time."""
    path = tmp_path_factory.mktemp("pictures") / "bus.png"
    cv2.imwrite(str(path), cv2.resize(cv2.imread(str(photographs[0])), (96, 128), interpolation=cv2.INTER_AREA))
    return path


@pytest.fixture
def half_build(picture: Path, engine_home: Path) -> Callable[..., tuple[Path, EngineManifest]]:
    def make(checkpoint: Path, backend: str = "half", **options: Any) -> tuple[Path, EngineManifest]:
        options = {"precision": "fp16", "size_hw": (64, 64), "images": [picture]} | options
        return build(checkpoint, backend=backend, **options)

    return make


_Build = Callable[..., tuple[Path, EngineManifest]]


def test_an_engine_that_passes_is_left_alone(made: Callable[..., Path], half_build: _Build) -> None:
    _, manifest = half_build(made())
    assert manifest.certificate.status == "passed"
    assert manifest.keep_fp32 == ("decode",)
    assert (manifest.certificate.kept, manifest.certificate.search) == ({}, "")


def test_an_overflow_and_an_error_that_is_none_are_both_found(
    made: Callable[..., Path], half_build: _Build, engine_home: Path
) -> None:
    lines: list[str] = []
    folder, manifest = half_build(made("overflow 4", "drown 0"), progress=lines.append)
    proof = manifest.certificate
    assert proof.status == "passed"
    overflow, drowned = (
        sorted(p for p in proof.kept if p.startswith("blocks.4.m.0")),
        [p for p in proof.kept if p.startswith("blocks.22.cv3.0")],
    )
    assert overflow
    assert drowned
    assert len(proof.kept) == len(overflow) + len(drowned)
    assert all("float16 ends at 65504" in proof.kept[p] for p in overflow)
    assert all("without it max score difference" in reason for reason in proof.kept.values())
    assert "without any one of these the engine fails" in proof.search
    assert manifest.keep_fp32 == ("decode", *proof.kept)
    # what is in the folder is the engine that was certified, and nothing of the others is left
    assert artifacts.read_manifest(folder, verify=True) == manifest
    assert sorted(p.name for p in folder.iterdir()) == ["engine.json", "model.half"]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    builds = [line for line in lines if line.startswith("precision, build ")]
    assert proof.search.startswith(f"{len(builds)} of at most 24 builds")
    assert builds[0] == "precision, build 1 of at most 24: everything in FP32 passes"


def test_several_overflows_and_a_module_that_is_kept_already(made: Callable[..., Path], half_build: _Build) -> None:
    _, manifest = half_build(made("overflow 4", "overflow 12"), keep_fp32=["blocks.12.m.0"])
    proof = manifest.certificate
    assert proof.status == "passed"
    assert proof.kept
    assert all(path.startswith("blocks.4.m.0") for path in proof.kept)
    assert manifest.keep_fp32 == ("decode", "blocks.12.m.0", *proof.kept)


def test_an_overflow_on_the_way_from_one_block_to_the_next(made: Callable[..., Path], half_build: _Build) -> None:
    """FP32 in either of them alone does not help: between two that are kept, the value stays FP32."""
    _, manifest = half_build(made("between 16"))
    proof = manifest.certificate
    assert proof.status == "passed"
    assert {path.split(".")[1] for path in proof.kept} >= {"16"}
    assert len({path.split(".")[1] for path in proof.kept}) > 1
    assert manifest.keep_fp32 == ("decode", *proof.kept)


def test_pictures_that_cannot_be_decoded_are_left_out(
    made: Callable[..., Path], half_build: _Build, picture: Path, tmp_path: Path
) -> None:
    bad = []
    for i in range(5):
        bad.append(tmp_path / f"{i}.jpg")
        bad[-1].write_text("no image")
    _, manifest = half_build(made("overflow 4"), images=[*bad, picture])
    assert manifest.certificate.status == "passed"
    assert all(path.startswith("blocks.4.m.0") for path in manifest.certificate.kept)


def test_without_a_search_the_failure_is_written(made: Callable[..., Path], half_build: _Build) -> None:
    folder, manifest = half_build(made("overflow 4"), search=False)
    proof = manifest.certificate
    assert (proof.status, proof.kept, proof.search) == ("failed", {}, "")
    assert artifacts.read_manifest(folder, verify=True) == manifest
    assert len(COMPILED) == 1


def test_what_is_wrong_in_fp32_too_is_not_searched_for(made: Callable[..., Path], half_build: _Build) -> None:
    folder, manifest = half_build(made(), "half-wrong")
    proof = manifest.certificate
    assert (proof.status, proof.kept) == ("failed", {})
    assert proof.search.startswith("it is not precision: with everything in FP32 it fails too (max score difference")
    assert manifest.keep_fp32 == ("decode",)
    assert artifacts.read_manifest(folder, verify=True) == manifest
    assert len(COMPILED) == 2


@pytest.mark.parametrize(("max_builds", "status"), [(1, "failed"), (2, "passed")])
def test_a_budget_that_runs_out(made: Callable[..., Path], half_build: _Build, max_builds: int, status: str) -> None:
    """Everything, then the block: with two builds the block is kept, though a part of it would do."""
    folder, manifest = half_build(made("overflow 4"), max_builds=max_builds)
    proof = manifest.certificate
    assert proof.status == status
    assert list(proof.kept) == (["blocks.4"] if status == "passed" else [])
    assert f"{max_builds} " in proof.search
    assert artifacts.read_manifest(folder, verify=True) == manifest
    assert len(COMPILED) == 1 + max_builds


def test_a_set_that_the_compiler_refuses_is_one_that_fails(made: Callable[..., Path], half_build: _Build) -> None:
    _, manifest = half_build(made("overflow 4"), "half-refusing")
    proof = manifest.certificate
    assert proof.status == "passed"
    assert "blocks.4.m.0" not in proof.kept
    assert any("blocks.4.m.0".startswith(path) or path.startswith("blocks.4.m.0.") for path in proof.kept)


@pytest.mark.parametrize("builds", [1, 3])
def test_an_interrupted_search_leaves_nothing(
    made: Callable[..., Path], half_build: _Build, engine_home: Path, builds: int, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def progress(stage: str) -> None:
        if stage.startswith(f"precision, build {builds} "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half_build(made("overflow 4"), progress=progress)
    assert [p for p in engine_home.rglob("*") if not p.is_dir()] == []
    assert list(tmp_path.glob("visionfast-*")) == []


# ---- the emulation that ranks them ------------------------------------------------------------------------


def _drifts(network: nn.Module, given: torch.Tensor, **options: Any) -> dict[str, Drift]:
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.inference_mode():
        found = measure_drift(network, lambda: network(given), **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    return {drift.path: drift for drift in found}


def test_drift_of_a_network_that_overflows_twice(made: Callable[..., Path]) -> None:
    """The second one shows although the first would have made everything after it NaN."""
    checkpoint = open_checkpoint(made("overflow 4", "overflow 12"))
    network = identify(checkpoint).load(checkpoint, name="m", size_hw=(64, 64)).modules["model"]
    drifts = _drifts(network, torch.rand(1, 3, 64, 64), keep_fp32=["decode"])
    overflowing = [path for path, drift in drifts.items() if drift.overflows]
    assert overflowing
    assert all(path.startswith(("blocks.4.m.0", "blocks.12.m.0")) for path in overflowing), overflowing
    assert {"blocks.4.m.0.cv1.conv", "blocks.12.m.0.cv1.conv"} <= set(overflowing)
    paths = list(drifts)
    assert paths[:3] == ["blocks.0", "blocks.0.conv", "blocks.1"]
    assert not any("decode" in path or path.endswith((".bn", ".act")) for path in paths)


def test_an_error_that_is_no_overflow_shows_as_one_layer_s(made: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(made("drown 0"))
    network = identify(checkpoint).load(checkpoint, name="m", size_hw=(64, 64)).modules["model"]
    drifts = _drifts(network, torch.rand(1, 3, 64, 64), keep_fp32=["decode"])
    assert not any(drift.overflows for drift in drifts.values())
    worst = max(drifts.values(), key=lambda drift: drift.relative_error)
    assert worst.path.startswith("blocks.22.cv3.0")
    assert worst.relative_error > 0.1
    others = [d.relative_error for d in drifts.values() if not d.path.startswith("blocks.22.cv3.0")]
    assert max(others) < 0.01


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("layer", "value", "overflows"),
    [
        (nn.ReLU(), 1.0, False),
        (nn.ReLU(), 65504.0, False),
        (nn.ReLU(), 65536.0, True),
        (nn.ReLU(), -1e30, False),  # minus infinity in FP16, and zero after it as in FP32
        (_Sum(), 30000.0, True),  # three of them are too much; a layer without weights can be the one
        (nn.ReLU(), float("inf"), False),  # FP32 has it too
        (nn.ReLU(), float("nan"), False),
        (nn.ReLU(), 0.0, False),
    ],
)
def test_drift_of_one_layer(layer: nn.Module, value: float, overflows: bool) -> None:
    drift = _drifts(nn.Sequential(layer), torch.full((1, 3, 2, 2), value))["0"]
    assert drift.overflows == overflows
    assert 0 <= drift.relative_error < 1e-3
    assert math.isfinite(drift.peak)


def test_drift_of_what_is_called_twice_or_stands_in_two_places() -> None:
    shared = nn.ReLU()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Linear(4, 4)
            self.a, self.b, self.unused = nn.Sequential(shared), nn.Sequential(shared, nn.Identity()), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(self.same(1e6 * self.same(x))))

    drifts = _drifts(Twice(), torch.rand(2, 4))
    assert list(drifts) == ["same", "a", "b"]
    assert drifts["same"].overflows
