"""DINO in FP16: what the residual stream of the trained models does, and the search for what else drifts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from half_backend import COMPILED, HalfBackend

from visionfast import machine
from visionfast.agreement import shortfall
from visionfast.backends import BACKENDS
from visionfast.build_plan import Plan
from visionfast.checkpoint import open_checkpoint
from visionfast.drift import measure_drift
from visionfast.families import LoadedModel, identify
from visionfast.families.dino_modules import fp32_islands
from visionfast.types import Certificate, EngineManifest

KINDS = ("dinov2_vits14", "dinov3_vits16")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "usable_cpus", lambda: 1)
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def pictures(reduced_photographs: Callable[[int], list[Path]]) -> list[Path]:
    return reduced_photographs(5)


@pytest.fixture
def loaded(dino_checkpoint: Callable[..., Path]) -> Callable[[str], LoadedModel]:
    def load(kind: str) -> LoadedModel:
        """Four blocks of it, at 4 × 6 patches."""
        checkpoint = open_checkpoint(dino_checkpoint(kind))
        patch = int(kind[-2:])
        model = identify(checkpoint).load(checkpoint, name="small", size_hw=(4 * patch, 6 * patch))
        network: Any = model.modules["model"]
        network.blocks = network.blocks[:4]
        return replace(model, fp32_islands={"model": fp32_islands(network)})

    return load


def _built(
    model: LoadedModel, images: list[Path], monkeypatch: pytest.MonkeyPatch, *, max_builds: int = 0
) -> EngineManifest:
    monkeypatch.setitem(BACKENDS, "half", f"{HalfBackend.__module__}:{HalfBackend.__name__}")
    plan = Plan(
        HalfBackend(), "1", ("cpu",), model, "0" * 64, "fp16", (), tuple(images), max_builds, lambda stage: None
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return plan.build("cpu", plan.export(Path(scratch)))[1]
    finally:
        COMPILED.clear()


def _with_outliers(model: LoadedModel, height: float) -> None:
    """Two channels of the residual stream that reach ±`height` from the first attention on, in every token.

    All norms behind it take them back, as those of the trained models do: what is computed is about what it was.
    Every weight is within what float16 holds.
    """
    network: Any = model.modules["model"]
    channels = [7, 300]
    with torch.no_grad():
        first = network.blocks[0]
        first.ls1.gamma[channels] = height / 200
        first.attn.proj.weight[channels] = 0
        first.attn.proj.bias[channels] = torch.tensor([200.0, -200.0])
        deviation = height * (2 / network.norm.weight.numel()) ** 0.5
        norms = [first.norm2, *(n for b in network.blocks[1:] for n in (b.norm1, b.norm2)), network.norm]
        for norm in norms:
            norm.weight *= deviation
            norm.weight[channels] = 0.01


def _stream(model: LoadedModel) -> float:
    """The residual stream's largest value."""
    network: Any = model.modules["model"]
    peaks: list[float] = []
    handles = [b.register_forward_hook(lambda _m, _i, o: peaks.append(float(o.abs().max()))) for b in network.blocks]
    with torch.inference_mode():
        network(torch.zeros(1, *model.spec.graphs[0].inputs[0].shape[1:]))
    for handle in handles:
        handle.remove()
    return max(peaks)


@pytest.mark.parametrize("kind", KINDS)
def test_outliers_in_the_residual_stream(
    loaded: Callable[[str], LoadedModel],
    pictures: list[Path],
    engine_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """As trained DINOv3 has them: beyond what float16 holds, where neither a weight nor a layer by itself is."""
    model = loaded(kind)
    _with_outliers(model, 2e5)
    assert _stream(model) == pytest.approx(2e5, rel=0.01)
    proof = _built(model, pictures, monkeypatch).certificate
    assert proof.status == "passed", shortfall(proof)
    assert 1e-9 < 1 - proof.measures["min_patch_cosine"] < 1e-5  # it is FP16, and as good as without outliers
    bare = _built(replace(model, fp32_islands={"model": ()}), pictures, monkeypatch).certificate
    assert bare.status == "failed"
    assert bare.measures["min_patch_cosine"] == -1  # which stands for what is no number


@pytest.mark.parametrize("left_out", ["norm", "embed", "ls"])
def test_each_kind_of_island_is_needed(
    loaded: Callable[[str], LoadedModel],
    pictures: list[Path],
    engine_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    left_out: str,
) -> None:
    """Without the norms their sums overflow, without the layer scales what is added does; an embedding in FP16 is
    put into FP32 by the first layer scale, and does no harm here."""
    model = loaded("dinov3_vits16")
    _with_outliers(model, 2e5)
    kept = tuple(path for path in model.fp32_islands["model"] if not path.rpartition(".")[2].startswith(left_out))
    assert len(kept) < len(model.fp32_islands["model"])
    proof = _built(replace(model, fp32_islands={"model": kept}), pictures, monkeypatch).certificate
    assert proof.status == ("passed" if left_out == "embed" else "failed")


@pytest.mark.parametrize("kind", KINDS)
def test_without_outliers_it_passes_well_within_its_bounds(
    loaded: Callable[[str], LoadedModel],
    pictures: list[Path],
    engine_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    manifest = _built(loaded(kind), pictures, monkeypatch, max_builds=24)
    proof = manifest.certificate
    assert (proof.status, proof.kept, proof.search) == ("passed", {}, "")
    assert "norm" in manifest.keep_fp32
    for name, bound in proof.tolerances.items():
        value = proof.measures[name]
        assert (1 - value < (1 - bound) / 10) if name.startswith("min") else value <= bound / 10, name


@pytest.mark.slow
def test_an_overflow_inside_a_perceptron_is_found(
    loaded: Callable[[str], LoadedModel], pictures: list[Path], engine_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("dinov3_vits16")
    mlp: Any = model.modules["model"].blocks[2].mlp  # type: ignore[index, union-attr]
    with torch.no_grad():  # between its layers some values are 100,000 times as large
        mlp.fc1.weight[:40] *= 1e5
        mlp.fc1.bias[:40] = 1e5 * mlp.fc1.bias[:40].clamp(-0.5, 0.5)
        mlp.fc2.weight[:, :40] /= 1e5
    manifest = _built(model, pictures, monkeypatch, max_builds=24)
    proof = manifest.certificate
    assert proof.status == "passed", shortfall(proof)
    assert set(proof.kept) in ({"blocks.2.mlp"}, {"blocks.2.mlp.fc1", "blocks.2.mlp.fc2"})
    assert any("float16 ends at 65504" in reason for reason in proof.kept.values())
    assert set(proof.kept) < set(manifest.keep_fp32)
    assert "of at most 24 builds" in proof.search


def test_the_emulation_points_at_it(loaded: Callable[[str], LoadedModel]) -> None:
    model = loaded("dinov3_vits16")
    network: Any = model.modules["model"]
    with torch.no_grad():
        network.blocks[1].mlp.fc1.weight[3] *= 1e5
    images = torch.randn(1, *model.spec.graphs[0].inputs[0].shape[1:], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        drifts = measure_drift(network, lambda: network(images), keep_fp32=model.fp32_islands["model"])
    overflowing = {drift.path for drift in drifts if drift.overflows}
    assert {"blocks.1.mlp.fc1", "blocks.1.mlp.fc2"} <= overflowing <= {
        "blocks.1", "blocks.1.mlp", "blocks.1.mlp.fc1", "blocks.1.mlp.fc2"
    } | {drift.path for drift in drifts if drift.path.startswith(("blocks.2", "blocks.3"))}  # fmt: skip
    assert not any("norm" in drift.path or "ls" in drift.path for drift in drifts)


def test_a_failed_certificate_says_by_how_much() -> None:
    proof = Certificate("failed", tolerances={"min_cls_cosine": 0.9999}, measures={"min_cls_cosine": 0.99985})
    assert shortfall(proof) == "min cls cosine 0.99985, allowed ≥ 0.9999"
