"""The detection kernels at whole sizes and on a trained model's outputs; their buffers; what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detections_definition import BUS, DEVICE, Setting, check, crowd, definition, predictions_of, run, torch

from visionfast.errors import OptionError, ShapeError
from visionfast.postprocess.kernels import detections as module
from visionfast.postprocess.kernels import layout
from visionfast.postprocess.kernels.detections import DetectionKernels
from visionfast.preprocess.reference import letterbox_geometry

# ---- whole sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchors", "num_classes", "objects", "around"), [(8400, 80, 400, 6), (33600, 80, 50, 8), (8400, 1000, 30, 10)]
)
def test_whole_sizes(anchors: int, num_classes: int, objects: int, around: int) -> None:
    predictions = crowd(np.random.default_rng(0), anchors, num_classes, objects, around)
    (found,) = run(predictions, [BUS], Setting(num_classes, iou=0.7))
    assert len(found.xyxy) >= min(objects, 300)


def test_every_anchor_a_candidate() -> None:
    """More candidates than the square of pairs holds, none of which suppresses another before it is full."""
    rng = np.random.default_rng(1)
    predictions = np.empty((1, 5, 5000), np.float32)
    predictions[:, :2] = rng.uniform(0, 640, (1, 2, 5000))
    predictions[:, 2:4] = rng.uniform(1, 40, (1, 2, 5000))
    predictions[:, 4] = rng.uniform(0.3, 1, (1, 5000))
    (found,) = run(predictions, [BUS], Setting(1, iou=0.05, max_det=2000))
    assert 300 < len(found.xyxy) < 2000  # so that it went on to the last candidate


def test_classes_apart_from_the_first_candidate_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one spot boxes of many classes, each of which keeps its own, in the square of pairs and beyond it."""
    monkeypatch.setattr(module, "_MAX_SIDE", 256)
    scores = np.full((700, 70), 0.01, np.float32)
    scores[np.arange(700), np.arange(700) // 10] = np.linspace(0.9, 0.5, 700)
    predictions = predictions_of([[10, 10, 50, 50]] * 700, scores)
    (found,) = run(predictions, [BUS], Setting(70))
    np.testing.assert_array_equal(found.class_id, np.arange(70))
    (found,) = run(predictions, [BUS], Setting(70, class_agnostic=True))
    np.testing.assert_array_equal(found.class_id, [0])


def test_more_candidates_than_nms_looks_at() -> None:
    predictions = crowd(np.random.default_rng(2), 400, 3, 20, 10)
    predictions[:, 4:] = np.round(predictions[:, 4:], 1)  # ties across the cut
    run(predictions, [BUS], Setting(3, conf=0.1, max_candidates=77))


def test_batch_of_32_of_images_of_every_size() -> None:
    rng = np.random.default_rng(3)
    predictions = np.concatenate([crowd(rng, 300, 4, slot, 5) for slot in range(32)])
    letterboxes = [letterbox_geometry((1 + 97 * slot, 3000 - 90 * slot), (640, 640)) for slot in range(32)]
    found = run(predictions, letterboxes, Setting(4))
    assert len(found[0].xyxy) == 0
    assert len(found[31].xyxy) >= 25


def test_outputs_of_a_trained_model(
    people_checkpoint: Path, built_engine: Callable[..., Path], photographs: list[Path]
) -> None:
    from visionfast.pipeline import open_engine

    with open_engine(built_engine(people_checkpoint, size_hw=(640, 640))) as detector:
        images = [(detector([path])[0].image_hw, detector.raw()["predictions"].copy()) for path in photographs]
    letterboxes = [letterbox_geometry(image_hw, (640, 640)) for image_hw, _ in images]
    predictions = np.concatenate([raw for _, raw in images])  # (2, 6, 8400)
    for setting, least in ((Setting(2, iou=0.7), 2), (Setting(2, conf=0.001, iou=0.7), 20)):
        for found in run(predictions, letterboxes, setting):
            assert len(found.xyxy) >= least


# ---- buffers ----------------------------------------------------------------------------------------------


def test_nothing_is_left_behind_and_nothing_is_allocated() -> None:
    setting = Setting(4, max_det=50)
    kernels = setting.kernels(batch=2, anchors=300)
    held = {name: value.data_ptr() for name, value in vars(kernels).items() if isinstance(value, torch.Tensor)}
    assert len(held) >= 10
    rng = np.random.default_rng(4)
    many = np.concatenate([crowd(rng, 300, 4, 40, 7), crowd(rng, 300, 4, 3, 9)])
    few = np.concatenate([crowd(rng, 300, 4, 1, 4), crowd(rng, 300, 4, 60, 5)])
    small = letterbox_geometry((33, 17), (640, 640))
    for predictions, letterboxes in (
        (many, [BUS, BUS]),
        (few, [small, BUS]),
        (many, [None, small]),
        (many, [BUS, BUS]),
    ):
        check(kernels, predictions, letterboxes, setting)
    now = {name: value.data_ptr() for name, value in vars(kernels).items() if isinstance(value, torch.Tensor)}
    assert now == held


def test_what_is_interrupted_half_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    predictions = crowd(np.random.default_rng(5), 300, 3, 10, 5)
    setting = Setting(3)
    kernels = setting.kernels(1, 300)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(kernels._kernels, "overlap", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check(kernels, predictions, [BUS], setting)
    check(kernels, predictions, [BUS], setting)


def test_inputs_are_left_as_they_were() -> None:
    setting = Setting(2)
    predictions = torch.tensor(crowd(np.random.default_rng(5), 50, 2, 5, 3), device=DEVICE)
    placement = torch.zeros((1, 8))
    layout.placement([BUS], placement.numpy())
    before, placement = predictions.clone(), placement.to(DEVICE)
    where = placement.clone()
    setting.kernels(1, 50).enqueue(predictions, placement)
    assert torch.equal(predictions, before)
    assert torch.equal(placement, where)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph needs a CUDA device")
def test_replays_in_a_cuda_graph() -> None:
    setting = Setting(4)
    kernels = setting.kernels(batch=2, anchors=300)
    predictions = torch.zeros((2, 8, 300), device=DEVICE)
    placement = np.empty((2, 8), np.float32)
    layout.placement([BUS, BUS], placement)
    where = torch.tensor(placement, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.enqueue(predictions, where)
    rng = np.random.default_rng(6)
    for _ in range(5):
        images = np.concatenate([crowd(rng, 300, 4, int(n), 5) for n in rng.integers(0, 60, 2)])
        predictions.copy_(torch.tensor(images))
        graph.replay()
        rows = kernels.found.cpu().numpy()
        for slot, image in enumerate(images):
            expected, candidates = definition(image, BUS, setting)
            assert rows[slot, 0, :2].tolist() == [len(expected.anchor), candidates]
            np.testing.assert_array_equal(layout.read_found(rows[slot]).xyxy, expected.xyxy)


# ---- refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch": 0}, "batch"),
        ({"anchors": 0}, "anchors"),
        ({"num_classes": 0}, "num_classes"),
        ({"coefficients": -1}, "coefficients"),
        ({"max_candidates": 0}, "max_candidates"),
        ({"conf": 1.5}, "conf"),
        ({"iou": float("nan")}, "iou"),
        ({"max_det": 0}, "max_det"),
        ({"classes": [3]}, "classes"),
        ({"anchors": 2**30}, "anchors"),
        ({"anchors": 2**20, "coefficients": 2**11}, "anchors"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], named: str) -> None:
    usual = {"batch": 1, "anchors": 10, "num_classes": 3, "coefficients": 0, "conf": 0.25, "iou": 0.5}
    with pytest.raises(OptionError, match=f"^{named}: expected"):
        DetectionKernels(**usual | {"device": DEVICE} | options)


def test_tensors_that_do_not_fit() -> None:
    kernels = Setting(3).kernels(batch=2, anchors=12)
    predictions, placement = torch.zeros((2, 7, 12), device=DEVICE), torch.zeros((2, 8), device=DEVICE)
    kernels.enqueue(predictions, placement)
    longer = torch.zeros(2 * 7 * 12 + 1, device=DEVICE)
    for wrong in (
        predictions[:1],
        predictions[:, :6],
        predictions.double(),
        predictions.transpose(1, 2).contiguous().transpose(1, 2),
        longer[1:].view(2, 7, 12),
        predictions.to("meta"),
    ):
        with pytest.raises(ShapeError, match=r"^predictions: expected"):
            kernels.enqueue(wrong, placement)
    with pytest.raises(ShapeError, match=r"^placement: expected"):
        kernels.enqueue(predictions, placement[:, :7])


def test_on_a_cpu_without_the_interpreter_it_says_what_to_set() -> None:
    program = """
from visionfast.errors import BackendUnavailableError
from visionfast.postprocess.kernels.detections import DetectionKernels
try:
    DetectionKernels(batch=1, anchors=9, num_classes=2, coefficients=0, conf=0.5, iou=0.5, device="cpu")
except BackendUnavailableError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "TRITON_INTERPRET=1" in ran.stdout
