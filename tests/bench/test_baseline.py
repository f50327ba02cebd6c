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
