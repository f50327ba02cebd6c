"""DINO through a whole build: the engine, its certificate, and what the command line says of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import visionfast as vf
from visionfast import artifacts, render
from visionfast.agreement import EMBED_TOLERANCES, shortfall
from visionfast.build import build
from visionfast.certify import certify_engine
from visionfast.errors import ManifestError, OptionError
from visionfast.types import Certificate, EngineManifest

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'visionfast[openvino]'")
pytest.importorskip("onnx", reason="engines are built from ONNX: pip install 'visionfast[build]'")

_SMALL = (112, 112)


@pytest.fixture
def pictures(reduced_photographs: Callable[[int], list[Path]]) -> list[Path]:
    return reduced_photographs(3)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    from rich.console import Console

    monkeypatch.setattr(render, "_out", Console(highlight=False, soft_wrap=True, width=200))
    return lambda: capsys.readouterr().out


def _passed(manifest: EngineManifest) -> None:
    proof = manifest.certificate
    assert proof.status == "passed"
    assert set(proof.tolerances) == set(EMBED_TOLERANCES["fp32"])
    assert proof.measures["min_cls_cosine"] > 0.9999999
    assert proof.measures["min_patch_cosine"] > 0.9999999
    assert proof.measures["moved_neighbours"] == 0
    assert (proof.measures["images"], proof.measures["views"]) == (2, 12)


@pytest.mark.parametrize(
    ("kind", "size_hw", "batch", "resize", "variant"),
    [
        ("dinov2_vits14", (224, 224), 1, None, "openvino-fp32-cpu-224x224-b1"),
        ("dinov3_vits16", (224, 336), 2, "stretch", "openvino-fp32-cpu-224x336-b2-squash"),
        pytest.param("dinov2_vits14", (518, 518), 1, None, "openvino-fp32-cpu-518x518-b1", marks=pytest.mark.slow),
        pytest.param("dinov3_vits16", (224, 224), 5, None, "openvino-fp32-cpu-224x224-b5", marks=pytest.mark.slow),
    ],
)
def test_an_engine_agrees_with_pytorch(
    dino_checkpoint: Callable[..., Path],
    engine_home: Path,
    photographs: list[Path],
    kind: str,
    size_hw: tuple[int, int],
    batch: int,
    resize: str | None,
    variant: str,
) -> None:
    folder, manifest = build(
        dino_checkpoint(kind),
        backend="openvino",
        size_hw=size_hw,
        batch=batch,
        resize=resize,  # type: ignore[arg-type]
    )
    assert folder == engine_home / "engines" / kind / variant
    assert artifacts.read_manifest(folder, verify=True) == manifest
    _passed(manifest)
    (graph,) = manifest.spec.graphs
    assert graph.inputs[0].shape == (batch, *size_hw, 3)
    assert [entry["file"] for entry in manifest.certificate.images] == ["bus.jpg", "zidane.jpg"]


@pytest.mark.slow
def test_an_engine_of_torch_agrees_too(
    dino_checkpoint: Callable[..., Path], engine_home: Path, pictures: list[Path]
) -> None:
    _, manifest = build(dino_checkpoint("dinov3_vits16"), backend="torch", size_hw=_SMALL, images=pictures)
    _passed(manifest)


def test_an_engine_from_elsewhere_is_certified(
    built_engine: Callable[..., Path], dino_checkpoint: Callable[..., Path], engine_home: Path, pictures: list[Path]
) -> None:
    """How images are brought to size is the engine's; the checkpoint does not say."""
    weights = dino_checkpoint("dinov2_vits14")
    folder = engine_home / "engines" / "net" / "variant"
    source = built_engine(weights, size_hw=_SMALL, resize="stretch", images=tuple(pictures))
    shutil.copytree(source, folder)
    before = artifacts.read_manifest(folder)
    artifacts.write_manifest(folder, dataclasses.replace(before, certificate=Certificate("not yet run on a device")))
    manifest = certify_engine(folder, model=weights, images=pictures)
    _passed(manifest)
    assert manifest.spec.preprocess.resize == "stretch"
    assert dataclasses.replace(manifest, certificate=before.certificate) == before


def test_an_engine_of_other_weights_fails(
    built_engine: Callable[..., Path], dino_checkpoint: Callable[..., Path], engine_home: Path, pictures: list[Path]
) -> None:
    """Whose manifest claims these."""
    folder = engine_home / "engines" / "net" / "variant"
    shutil.copytree(
        built_engine(dino_checkpoint("dinov2_vits14"), size_hw=_SMALL, resize="stretch", images=tuple(pictures)), folder
    )
    other = dino_checkpoint("dinov2_vits14", 1)
    before = artifacts.read_manifest(folder)
    artifacts.write_manifest(folder, dataclasses.replace(before, weights_sha256=artifacts.sha256_file(other)))
    manifest = certify_engine(folder, model=other, images=pictures[:1])
    assert manifest.certificate.status == "failed"
    assert artifacts.read_manifest(folder, verify=True) == manifest
    assert shortfall(manifest.certificate)


def test_an_engine_with_one_weight_changed_fails(
    built_engine: Callable[..., Path], dino_checkpoint: Callable[..., Path], engine_home: Path, pictures: list[Path]
) -> None:
    """In its own file, with a sha256 to match: the certificate alone can tell."""
    weights = dino_checkpoint("dinov2_vits14")
    folder = engine_home / "engines" / "net" / "variant"
    shutil.copytree(built_engine(weights, size_hw=_SMALL, resize="stretch", images=tuple(pictures)), folder)
    shutil.rmtree(folder / "cache")  # compiled from what it was
    file = folder / "model.bin"
    values = np.fromfile(file, np.float32)
    middle = slice(len(values) // 2, len(values) // 2 + 384)
    assert 0.001 < np.abs(values[middle]).mean() < 1
    values[middle] += 1
    values.tofile(file)
    before = artifacts.read_manifest(folder)
    artifacts.write_manifest(
        folder, dataclasses.replace(before, sha256={**before.sha256, "model.bin": artifacts.sha256_file(file)})
    )
    assert certify_engine(folder, model=weights, images=pictures[:1]).certificate.status == "failed"


def test_what_the_command_line_shows(
    built_engine: Callable[..., Path],
    dino_checkpoint: Callable[..., Path],
    pictures: list[Path],
    shown: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = built_engine(dino_checkpoint("dinov2_vits14"), size_hw=_SMALL, resize="stretch", images=tuple(pictures))
    manifest = artifacts.read_manifest(folder)
    render.manifest(folder, manifest)
    text = shown()
    split = [line.strip().partition("  ") for line in text.splitlines() if line.startswith(" ")]
    rows = {name: value.strip() for name, _, value in split}
    assert rows["model"].startswith("dinov2_vits14 (embed), weights sha256")
    assert rows["input"] == "1 × 112×112, images (1, 112, 112, 3) uint8"
    assert rows["output"] == "cls (1, 384) float32, patches (1, 8, 8, 384) float32"
    assert rows["images"] == "Resize((112, 112), bicubic, antialias), all of it squashed; Normalize(ImageNet)"
    assert "classes" not in rows
    assert "certificate: passed on 2 images, against eager FP32 PyTorch, 12 views" in text
    assert f"min patch cosine           1 - {1 - manifest.certificate.measures['min_patch_cosine']:.1e}" in text
    assert "≥ 0.9999" in text
    assert "views" not in rows
    assert not {"kept in FP32", "layers"} & rows.keys()
    crop = dataclasses.replace(manifest.spec.preprocess, resize="centre-crop", cover_hw=(128, 128))
    spec = dataclasses.replace(manifest.spec, preprocess=crop)
    render.manifest(folder, dataclasses.replace(manifest, spec=spec, keep_fp32=("blocks.1",), layers={"fp16": 7}))
    cropped = shown()
    assert "blocks.1" in cropped
    assert "7 give fp16" in cropped
    assert "Resize(128, bicubic, antialias), CenterCrop(112), Normalize(ImageNet)" in cropped
    wide = dataclasses.replace(crop, size_hw=(112, 224), cover_hw=(128, 256), mean=(0.5, 0.4, 0.25))
    render.manifest(folder, dataclasses.replace(manifest, spec=dataclasses.replace(spec, preprocess=wide)))
    assert (
        "Resize(to cover 128×256, bicubic, antialias), CenterCrop((112, 224)), "
        "Normalize((0.5, 0.4, 0.25), (0.229, 0.224, 0.225))"
    ) in shown()
    monkeypatch.setenv("VISIONFAST_HOME", str(folder.parents[2]))
    render.inventory()
    assert f"{folder.name} dinov2_vits14 embed passed yes" in " ".join(shown().split())


def test_build_on_the_command_line(dino_checkpoint: Callable[..., Path], tmp_path: Path, pictures: list[Path]) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for picture in pictures:
        shutil.copy(picture, images)

    def build_with(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "visionfast.cli", "build", "--model", str(dino_checkpoint("dinov3_vits16"))]
        command += ["--imgsz", "64x96", "--backend", "openvino", "--images", str(images), *options]
        environment = os.environ | {"VISIONFAST_HOME": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)

    done = build_with("--resize", "squash")
    assert done.returncode == 0, done.stderr
    assert "certificate: passed on 2 images, against eager FP32 PyTorch, 12 views" in done.stdout
    (folder,) = (tmp_path / "engines" / "dinov3_vits16").iterdir()
    assert done.stdout.splitlines()[-1] == str(folder)
    document = json.loads((folder / "engine.json").read_text())
    assert document["spec"]["preprocess"]["resize"] == "stretch"
    for option in ("stretch", ""):
        refused = build_with("--resize", option)
        assert refused.returncode == 1
        assert refused.stderr.splitlines() == [f"visionfast: --resize {option}: expected crop or squash"]


def test_a_detector_is_neither_cropped_nor_squashed(
    seeded_checkpoint: Callable[..., Path], sam_checkpoint: Callable[[str], Path], engine_home: Path
) -> None:
    for checkpoint in (seeded_checkpoint("detect", 3), sam_checkpoint("mobile_sam")):
        with pytest.raises(OptionError, match="resize") as caught:
            build(checkpoint, backend="openvino", resize="stretch")
        assert "\n" not in str(caught.value)
    assert list(engine_home.rglob("*")) == []


# ---- engine.json ------------------------------------------------------------------------------------------


def _images(**changes: object) -> Callable[[dict], object]:
    return lambda spec: spec["graphs"][0]["inputs"][0].update(changes)


def _output(number: int, **changes: object) -> Callable[[dict], object]:
    return lambda spec: spec["graphs"][0]["outputs"][number].update(changes)


def _pre(**changes: object) -> Callable[[dict], object]:
    return lambda spec: spec["preprocess"].update(changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_pre(resize="letterbox"), "resize: expected centre-crop or stretch for embed, got letterbox"),
        (_pre(resize="centre-crop"), "expected cover_hw for centre-crop and for no other"),
        (_pre(cover_hw=[128, 128]), "expected cover_hw for centre-crop and for no other"),
        (
            _pre(resize="centre-crop", cover_hw=[128, 111]),
            r"cover_hw: expected at least \(112, 112\), got \(128, 111\)",
        ),
        (_pre(size_hw=[112, 126]), r"images: expected \(1, 3, 112, 126\) NCHW .* got \(1, 112, 112, 3\) NHWC uint8"),
        (_images(layout=""), "images: expected .* got .* uint8"),
        (_images(layout="NCHW"), "images: expected"),
        (_images(dtype="float32"), "images: expected"),
        (_images(shape=[2, 112, 112, 3]), r"expected cls \(2, D\)"),
        (_output(0, shape=[1, 384, 1]), r"expected cls \(1, D\) and patches \(1, h, w, D\)"),
        (_output(0, shape=[1, 383]), r"expected cls \(1, D\) and patches \(1, h, w, D\)"),
        (_output(0, dtype="int64"), "float32 or float16"),
        (_output(1, shape=[1, 64, 384]), "square patches of 112×112 pixels"),
        (_output(1, shape=[1, 8, 7, 384]), "square patches"),
        (_output(1, shape=[1, 9, 9, 384]), "square patches"),
        (lambda spec: spec["graphs"][0]["outputs"].pop(), "outputs cls and patches"),
        (lambda spec: spec["graphs"].append(spec["graphs"][0]), "expected one graph"),
    ],
)
def test_a_manifest_that_no_embedder_can_be_run_by(
    built_engine: Callable[..., Path],
    dino_checkpoint: Callable[..., Path],
    pictures: list[Path],
    tmp_path: Path,
    change: Callable[[dict], object],
    says: str,
) -> None:
    source = built_engine(dino_checkpoint("dinov2_vits14"), size_hw=_SMALL, resize="stretch", images=tuple(pictures))
    for file in source.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    document = json.loads((source / "engine.json").read_text())
    change(document["spec"])
    (tmp_path / "engine.json").unlink()
    (tmp_path / "engine.json").write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=says) as caught:
        vf.Embedder.open(tmp_path)
    assert str(caught.value).endswith("build the engine again")
    assert "\n" not in str(caught.value)
