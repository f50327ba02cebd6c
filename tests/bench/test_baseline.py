"""The naive baseline is a fair opponent only if it finds what the engine finds."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from visionfast.bench.baseline import NaivePyTorch
from visionfast.certify import compare_detections
from visionfast.errors import CheckpointError, UnsupportedModelError

pytest.importorskip("ultralytics", reason="the baseline needs ultralytics: pip install 'visionfast[build]'")


def test_finds_what_the_engine_finds(
    shared_data: Path, photographs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino", reason="the engine needs openvino: pip install 'visionfast[openvino]'")
    from visionfast.build import build
    from visionfast.pipeline import Detector

    weights = shared_data / "weights" / "yolov8n-coco.pt"
    if not weights.is_file():
        pytest.skip(f"{weights.name} is not in the test data")
    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path))
    engine, _ = build(weights, backend="openvino")
    naive = NaivePyTorch(weights)
    with Detector.open(engine) as detector:
        for path in photographs:
            (expected,), got = detector([path]), naive(path.read_bytes())
            assert len(expected) > 0
            # PIL resizes with antialias, so confidences move a little: within 0.1 of the threshold may differ.
            measures = compare_detections(expected, got, conf=0.25, slack=0.1)
            assert measures["unmatched"] == 0
            assert measures["min_iou"] > 0.8
            assert got.image_hw == expected.image_hw


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (self.path, 0o700)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    marker, weights = tmp_path / "ran", tmp_path / "evil.pt"
    weights.write_bytes(pickle.dumps(_Touch(str(marker))))
    with pytest.raises(CheckpointError):
        NaivePyTorch(weights)
    assert not marker.exists()


def test_another_task_is_refused(shared_data: Path) -> None:
    weights = shared_data / "weights" / "yolov8n-seg-coco.pt"
    if not weights.is_file():
        pytest.skip(f"{weights.name} is not in the test data")
    with pytest.raises(UnsupportedModelError, match="got one for segment"):
        NaivePyTorch(weights)


def test_several_images_go_through_together(photographs: list[Path]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    generator = torch.Generator().manual_seed(0)
    predictions = torch.rand(2, 7, 200, generator=generator)  # of two images: boxes, 3 classes
    predictions[:, :4] = predictions[:, :4] * 200 + 20
    seen: list[tuple[int, ...]] = []

    class Fixed(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(images.shape))
            return predictions[: len(images)]

    naive = NaivePyTorch.of_module(Fixed(), size_hw=(320, 320), conf=0.6, max_det=20)
    encoded = [path.read_bytes() for path in photographs]
    first, second = naive.many(encoded)
    assert seen == [(2, 3, 320, 320)]
    assert len(first) == len(second) == 20
    alone = naive(encoded[0])
    assert (alone.xyxy == first.xyxy).all()
    assert first.image_hw != second.image_hw
    assert not (first.confidence == second.confidence).all()
