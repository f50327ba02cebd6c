"""The search for what drifts in FP16, through a prompt segmenter's two graphs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from half_backend import COMPILED, HalfBackend
from torch import nn

from visionfast.backends import BACKENDS
from visionfast.build_plan import Plan
from visionfast.checkpoint import open_checkpoint
from visionfast.families import LoadedModel, identify
from visionfast.types import EngineManifest

pytest.importorskip("segment_anything", reason="networks are made with segment_anything: the extra build")


class Encoder(nn.Module):
    """As small as an encoder can be: a pixel of the features sees one patch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 16, 16)
        self.inner = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1))
        self.out = nn.Conv2d(16, 256, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.out(self.inner(self.patches(images)))
        return embeddings


@pytest.fixture
def model(sam_checkpoint: Callable[..., Path]) -> LoadedModel:
    checkpoint = open_checkpoint(sam_checkpoint("mobile_sam"))
    loaded = identify(checkpoint).load(checkpoint, name="small")
    torch.manual_seed(0)
    encoder = Encoder().eval().requires_grad_(False)
    return replace(
        loaded,
        modules={"encoder": encoder, "decoder": loaded.modules["decoder"]},
        fp32_islands={**loaded.fp32_islands, "encoder": ()},
    )


def _built(model: LoadedModel, images: list[Path], monkeypatch: pytest.MonkeyPatch) -> EngineManifest:
    monkeypatch.setitem(BACKENDS, "half", f"{HalfBackend.__module__}:{HalfBackend.__name__}")
    plan = Plan(HalfBackend(), "1", ("cpu",), model, "0" * 64, "fp16", (), tuple(images), 24, lambda stage: None)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return plan.build("cpu", plan.export(Path(scratch)))[1]
    finally:
        COMPILED.clear()


@pytest.mark.slow
def test_what_overflows_in_the_encoder_is_found(
    model: LoadedModel, photographs: list[Path], engine_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        model.modules["encoder"].inner[0].weight *= 2e5
        model.modules["encoder"].inner[0].bias *= 2e5
        model.modules["encoder"].inner[2].weight /= 2e5
    manifest = _built(model, photographs[:1], monkeypatch)
    certificate = manifest.certificate
    assert certificate.status == "passed"
    assert set(certificate.kept) == {"encoder.inner.0", "encoder.inner.2"}
    assert "float16 ends at 65504" in certificate.kept["encoder.inner.0"]
    assert {"encoder.inner.0", "encoder.inner.2", "decoder.embed"} <= set(manifest.keep_fp32)
    assert "of at most 24 builds" in certificate.search


def test_what_does_not_drift_needs_no_search(
    model: LoadedModel, photographs: list[Path], engine_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = _built(model, photographs[:1], monkeypatch)
    assert manifest.certificate.status == "passed"
    assert manifest.certificate.kept == {}
    assert manifest.certificate.measures["max_logit_difference"] > 1e-5  # it really is FP16
