"""An engine that was built before is certified on this machine, and engine.json says what came of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visionfast import artifacts
from visionfast.agreement import shortfall
from visionfast.backends import get_backend
from visionfast.backends.fake import FakeRunner
from visionfast.certify import CONF, IOU, certify, certify_engine, images_in
from visionfast.checkpoint import open_checkpoint
from visionfast.errors import (
    ArtifactError,
    BackendError,
    BackendUnavailableError,
    CertificateError,
    CheckpointError,
    ManifestError,
)
from visionfast.families import identify
from visionfast.pipeline import Detector, open_engine
from visionfast.types import Certificate, EngineManifest

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'visionfast[openvino]'")


@pytest.fixture
def weights(seeded_checkpoint: Callable[..., Path]) -> Path:
    return seeded_checkpoint("detect", 3)


def _uncertified(folder: Path, **changes: object) -> EngineManifest:
    manifest = artifacts.read_manifest(folder)
    manifest = dataclasses.replace(
        manifest, certificate=Certificate("not yet run on a device", kept={"a": "b"}, search="c"), **changes
    )
    artifacts.write_manifest(folder, manifest)
    return manifest


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_an_engine_from_elsewhere_is_certified(
    backend: str,
    weights: Path,
    built_engine: Callable[..., Path],
    engine_home: Path,
    photographs: list[Path],
) -> None:
    folder = engine_home / "engines" / "net" / "variant"
    shutil.copytree(built_engine(weights, backend=backend, size_hw=(64, 96)), folder)
    before = _uncertified(folder)
    (engine_home / "models" / "net").mkdir(parents=True)
    shutil.copy(weights, engine_home / "models" / "net" / "renamed.pt")
    (engine_home / "models" / "net" / "another.pt").write_bytes(b"not these")
    stages: list[str] = []
    manifest = certify_engine(folder, images=photographs[:1], progress=stages.append)
    assert manifest.certificate.status == "passed"
    assert [entry["file"] for entry in manifest.certificate.images] == ["bus.jpg"]
    assert manifest.certificate.environment["cpu"]
    assert (manifest.certificate.kept, manifest.certificate.search) == ({"a": "b"}, "c")
    assert dataclasses.replace(manifest, certificate=before.certificate) == before
    assert artifacts.read_manifest(folder, verify=True) == manifest
    assert stages == ["checking the engine's files", "reading the checkpoint", "certifying"]


def test_a_failure_is_recorded(copied_engine: Path, seeded_checkpoint: Callable[..., Path], weights: Path) -> None:
    """An engine of other weights, whose manifest claims these."""
    other = seeded_checkpoint("detect", 3).with_name("changed.pt")
    content = torch.load(weights, weights_only=False)
    for tensor in content["model"].model[-1].cv3.parameters():
        tensor.data += 0.5
    torch.save(content, other)
    _uncertified(copied_engine, weights_sha256=artifacts.sha256_file(other))
    manifest = certify_engine(copied_engine, model=other)
    assert manifest.certificate.status == "failed"
    assert artifacts.read_manifest(copied_engine, verify=True) == manifest
    assert shortfall(manifest.certificate).startswith(("max score difference", "unmatched"))


def test_the_weights_have_to_be_those(copied_engine: Path, seeded_checkpoint: Callable[..., Path]) -> None:
    before = _uncertified(copied_engine)
    wrong = seeded_checkpoint("detect", 2)
    with pytest.raises(CheckpointError) as caught:
        certify_engine(copied_engine, model=wrong)
    assert before.weights_sha256 in str(caught.value)
    assert artifacts.sha256_file(wrong) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="cannot be read"):
        certify_engine(copied_engine, model=wrong.with_name("none.pt"))
    with pytest.raises(ArtifactError, match=f"has the sha256 {before.weights_sha256} of the weights.*with --model"):
        certify_engine(copied_engine)
    assert artifacts.read_manifest(copied_engine) == before


def test_a_changed_engine_is_refused_first(copied_engine: Path, weights: Path) -> None:
    before = _uncertified(copied_engine)
    with (copied_engine / "model.bin").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(ManifestError, match="it was changed"):
        certify_engine(copied_engine, model=weights)
    assert artifacts.read_manifest(copied_engine) == before


def test_an_engine_that_cannot_run_here(copied_engine: Path, weights: Path) -> None:
    before = _uncertified(copied_engine, device="sm89")
    with pytest.raises(BackendError, match="device sm89"):
        certify_engine(copied_engine, model=weights)
    assert artifacts.read_manifest(copied_engine) == before


def test_what_goes_wrong_leaves_the_certificate_as_it_was(copied_engine: Path, weights: Path, tmp_path: Path) -> None:
    text = tmp_path / "a.jpg"
    text.write_text("no image")
    before = _uncertified(copied_engine)
    with pytest.raises(CertificateError, match="none of the 1 images can be decoded"):
        certify_engine(copied_engine, model=weights, images=[text])
    assert artifacts.read_manifest(copied_engine) == before
    assert not [path for path in copied_engine.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"class_names": ("a",)}, r"spec\.class_names: expected what the weights say, .*kind 0.*, got \('a',\)"),
        ({"strides": (8, 16)}, r"spec\.strides: expected what the weights say, \(8, 16, 32\), got \(8, 16\)"),
        ({"preprocess": {"pad_value": 20}}, r"spec\.preprocess: .*pad_value=114.* got .*pad_value=20"),
        ({"task": "segment"}, r"expected the outputs predictions, prototypes for segment, got predictions"),
        ({"architecture": "yolov8s"}, r"spec\.architecture: expected what the weights say, yolov8n, got yolov8s"),
    ],
)
def test_an_engine_that_is_served_otherwise_than_its_weights_say(
    copied_engine: Path, weights: Path, change: dict[str, Any], says: str
) -> None:
    spec = artifacts.read_manifest(copied_engine).spec
    if "preprocess" in change:
        change = {"preprocess": dataclasses.replace(spec.preprocess, **change["preprocess"])}
    before = _uncertified(copied_engine, spec=dataclasses.replace(spec, **change))
    with pytest.raises(ManifestError, match=says) as caught:
        certify_engine(copied_engine, model=weights)
    assert "\n" not in str(caught.value)
    assert artifacts.read_manifest(copied_engine) == before


@pytest.mark.parametrize("missing", ["torch", "ultralytics"])
def test_without_the_build_extra(
    copied_engine: Path, weights: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == missing else found(name, *a))
    with pytest.raises(BackendUnavailableError, match=rf"needs {missing}; `pip install 'visionfast\[build\]'`"):
        certify_engine(copied_engine, model=weights)


def test_outputs_that_the_task_does_not_have(copied_engine: Path, weights: Path) -> None:
    spec = artifacts.read_manifest(copied_engine).spec
    graph = spec.graphs[0]
    renamed = dataclasses.replace(graph, outputs=(dataclasses.replace(graph.outputs[0], name="boxes"),))
    before = _uncertified(copied_engine, spec=dataclasses.replace(spec, graphs=(renamed,)))
    with pytest.raises(ManifestError, match="expected the outputs predictions for detect, got boxes"):
        certify_engine(copied_engine, model=weights)
    assert artifacts.read_manifest(copied_engine) == before


def test_folders_without_images(tmp_path: Path) -> None:
    (tmp_path / "folder.jpg").mkdir()
    for folder in (tmp_path, tmp_path / "none", Path(__file__)):
        with pytest.raises(CertificateError, match="expected a folder with images to certify on") as caught:
            images_in(folder)
        assert str(folder) in str(caught.value)


# ---- what is certified is what is served ------------------------------------------------------------------


def test_the_candidate_s_detections_are_compared(copied_engine: Path, weights: Path, photographs: list[Path]) -> None:
    checkpoint = open_checkpoint(weights)
    model = identify(checkpoint).load(checkpoint, name="m")
    manifest = artifacts.read_manifest(copied_engine)
    graph = manifest.spec.graphs[0]
    imagined = np.zeros(graph.outputs[0].shape, np.float32)
    imagined[0, :5, 0] = 50, 50, 40, 40, 0.9
    with (
        get_backend("openvino").load(copied_engine, manifest, graph) as runner,
        open_engine(copied_engine, conf=CONF, iou=IOU) as candidate,
        Detector(manifest.spec, FakeRunner(graph, lambda feeds: {"predictions": imagined})) as imagines,
    ):
        as_served = certify(model, runner, photographs[:1], precision="fp32", candidate=candidate)
        on_host = certify(model, runner, photographs[:1], precision="fp32")
        assert as_served.status == on_host.status == "passed"
        assert as_served.measures == on_host.measures
        wrong = certify(model, runner, photographs[:1], precision="fp32", candidate=imagines)
        assert wrong.status == "failed"
        # The raw tensors are the runner's all the same.
        assert wrong.measures == on_host.measures | {"unmatched": 1.0}
        blind = FakeRunner(graph, lambda feeds: {"predictions": 0 * imagined})
        raw = certify(model, blind, photographs[:1], precision="fp32", candidate=candidate)
        assert raw.status == "failed"
        assert raw.measures["unmatched"] == 0
        assert candidate([photographs[0]])  # it was not closed


@pytest.mark.parametrize(
    ("measures", "says"),
    [
        ({"max_score_difference": 0.04, "min_iou": 0.97}, ""),
        ({"max_score_difference": 0.08, "min_iou": 0.97}, "max score difference 0.08, allowed ≤ 0.04"),
        ({"max_score_difference": 0.05, "min_iou": 0.2}, "min iou 0.2, allowed ≥ 0.97"),
        (
            {"max_score_difference": 3.4028234663852886e38, "min_iou": 0},
            "max score difference not finite, allowed ≤ 0.04",
        ),
        ({"unmatched": 3, "min_iou": 0.97}, "unmatched 3, allowed ≤ 0"),
    ],
)
def test_shortfall(measures: dict[str, float], says: str) -> None:
    bounds = {"max_score_difference": 0.04, "min_iou": 0.97, "unmatched": 0}
    certificate = Certificate("failed", measures=measures, tolerances={name: bounds[name] for name in measures})
    assert shortfall(certificate) == says


def test_older_manifests_are_read(copied_engine: Path) -> None:
    path = copied_engine / artifacts.MANIFEST_NAME
    document = json.loads(path.read_text())
    del document["platform"], document["certificate"]["kept"], document["certificate"]["search"]
    path.write_text(json.dumps(document))
    manifest = artifacts.read_manifest(copied_engine)
    assert (manifest.platform, manifest.certificate.kept, manifest.certificate.search) == ("", {}, "")
