"""A certificate passes for the engine and fails for a wrong one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from visionfast.agreement import compare_detections
from visionfast.backends.fake import FakeRunner
from visionfast.backends.torch import TorchRunner
from visionfast.certify import certify, default_images, images_in
from visionfast.checkpoint import open_checkpoint
from visionfast.errors import CertificateError
from visionfast.families import LoadedModel, identify
from visionfast.postprocess.masks import InstanceMasks
from visionfast.results import Detections
from visionfast.types import Certificate

pytest.importorskip("torch", reason="the reference is eager PyTorch: pip install 'visionfast[build]'")


def _loaded(path: Path, size_hw: tuple[int, int]) -> LoadedModel:
    checkpoint = open_checkpoint(path)
    return identify(checkpoint).load(checkpoint, name="m", size_hw=size_hw)


@pytest.fixture(scope="module")
def untrained(seeded_checkpoint: Callable[..., Path]) -> LoadedModel:
    return _loaded(seeded_checkpoint("detect", 3), (160, 160))


@pytest.fixture(scope="module")
def trained(people_checkpoint: Path) -> LoadedModel:
    return _loaded(people_checkpoint, (320, 320))


Change = Callable[[dict[str, npt.NDArray[Any]]], object]


def _certified(model: LoadedModel, images: list[Path], change: Change = lambda outputs: None) -> Certificate:
    graph = model.spec.graphs[0]
    eager = TorchRunner(model.modules[graph.name], graph)

    def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        outputs = {name: array.copy() for name, array in eager.infer(feeds).items()}
        change(outputs)
        return outputs

    return certify(model, FakeRunner(graph, answer), images, precision="fp32")


def _scale_scores(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][:, 4:] *= 0.9


def _shift_boxes(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][:, 0] += 3


def _swap_width_and_height(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][:, 2:4] = outputs["predictions"][:, 3:1:-1].copy()


def _one_nan_score(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][0, 4, 7] = np.nan


def _all_nan(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][:] = np.nan


def _infinite_boxes(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][:, :4] = np.inf


def _nothing(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][:] = 0


def _next_anchor(outputs: dict[str, npt.NDArray[Any]]) -> None:
    outputs["predictions"][:] = np.roll(outputs["predictions"], 1, axis=2)


_WRONG = [
    _scale_scores,
    _shift_boxes,
    _one_nan_score,
    _all_nan,
    _infinite_boxes,
    _nothing,
    _next_anchor,
]


def test_the_right_engine_passes(untrained: LoadedModel, photographs: list[Path]) -> None:
    certificate = _certified(untrained, photographs)
    assert certificate.status == "passed"
    assert certificate.measures["images"] == 2
    assert certificate.measures["max_score_difference"] == 0
    assert certificate.environment["cpu"]
    assert all(len(entry["sha256"]) == 64 for entry in certificate.images)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity minus infinity
@pytest.mark.parametrize("change", _WRONG)
def test_a_wrong_engine_fails_even_where_nothing_is_found(
    untrained: LoadedModel, photographs: list[Path], change: Change
) -> None:
    certificate = _certified(untrained, photographs[:1], change)
    assert certificate.status == "failed"
    json.dumps(asdict(certificate), allow_nan=False)


def test_a_trained_engine(trained: LoadedModel, photographs: list[Path]) -> None:
    certificate = _certified(trained, photographs)
    assert certificate.status == "passed"
    assert certificate.measures["objects"] >= 4
    assert certificate.measures["min_iou"] == pytest.approx(1)
    for change in (_scale_scores, _swap_width_and_height, _all_nan, _nothing):
        certificate = _certified(trained, photographs[:1], change)
        assert certificate.status == "failed"
    assert certificate.measures["unmatched"] >= 3


def test_images_that_cannot_be_decoded_are_named(
    untrained: LoadedModel, photographs: list[Path], tmp_path: Path
) -> None:
    text, cut = tmp_path / "text.jpg", tmp_path / "cut.jpg"
    text.write_text("no image")
    cut.write_bytes(photographs[0].read_bytes()[:5000])
    certificate = _certified(untrained, [text, photographs[0], cut, tmp_path / "none.jpg"])
    assert certificate.status == "passed"
    assert [entry["file"] for entry in certificate.images] == ["text.jpg", "bus.jpg", "cut.jpg", "none.jpg"]
    assert ["error" in entry for entry in certificate.images] == [True, False, True, True]
    assert certificate.measures["images"] == 1
    with pytest.raises(CertificateError, match="none of the 2 images can be decoded; give real ones with --images"):
        _certified(untrained, [text, cut])
    with pytest.raises(CertificateError, match="none of the 0 images"):
        _certified(untrained, [])


# ---- comparing two answers --------------------------------------------------------------------------------

_HW = (100, 100)


def _found(*objects: tuple[tuple[float, float, float, float], float, int], masks: bool = False) -> Detections:
    xyxy = np.array([o[0] for o in objects], np.float32).reshape(-1, 4)
    dense = np.zeros((len(objects), *_HW), np.bool_)
    for plane, (x1, y1, x2, y2) in zip(dense, xyxy.astype(int), strict=True):
        plane[y1:y2, x1:x2] = True
    return Detections(
        xyxy=xyxy,
        confidence=np.array([o[1] for o in objects], np.float32),
        class_id=np.array([o[2] for o in objects], np.int64),
        image_hw=_HW,
        mask=InstanceMasks.from_dense(dense) if masks else None,
    )


_A = ((10, 10, 30, 30), 0.9, 0)
_B = ((50, 50, 90, 90), 0.8, 1)


@pytest.mark.parametrize(
    ("expected", "got", "measures"),
    [
        ((), (), {"objects": 0, "unmatched": 0}),
        ((_A,), (), {"objects": 1, "unmatched": 1}),
        ((), (_A,), {"objects": 0, "unmatched": 1}),
        ((_A, _B), (_A, _B), {"objects": 2, "unmatched": 0, "min_iou": 1, "max_confidence_difference": 0}),
        ((_A, _B), (_B, _A), {"objects": 2, "unmatched": 0, "min_iou": 1, "max_confidence_difference": 0}),
        ((_A, _B), (_B,), {"objects": 2, "unmatched": 1, "min_iou": 1, "max_confidence_difference": 0}),
        # another class is another object
        ((_A,), ((_A[0], 0.9, 1),), {"objects": 1, "unmatched": 2}),
        # so is one too far away
        ((_A,), (((25, 10, 45, 30), 0.9, 0),), {"objects": 1, "unmatched": 2}),
        # one object cannot stand for two
        ((_A,), (_A, _A), {"objects": 1, "unmatched": 1, "min_iou": 1, "max_confidence_difference": 0}),
        # near the threshold the slack explains that one side does not have it; further off it does not
        ((_A, (_B[0], 0.259, 1)), (_A,), {"objects": 2, "unmatched": 0, "min_iou": 1, "max_confidence_difference": 0}),
        ((_A, (_B[0], 0.261, 1)), (_A,), {"objects": 2, "unmatched": 1, "min_iou": 1, "max_confidence_difference": 0}),
        (
            (_A,),
            (((10, 10, 30, 28), 0.85, 0),),
            {"objects": 1, "unmatched": 0, "min_iou": 0.9, "max_confidence_difference": 0.05},
        ),
    ],
)
def test_compare_detections(expected: Any, got: Any, measures: dict[str, float]) -> None:
    assert compare_detections(_found(*expected), _found(*got), conf=0.25, slack=0.01) == pytest.approx(measures)


def test_compare_masks() -> None:
    got = _found(((10, 10, 30, 28), 0.9, 0), _B, masks=True)
    measures = compare_detections(_found(_A, _B, masks=True), got, conf=0.25, slack=0.01)
    assert measures["min_mask_iou"] == pytest.approx(0.9)


# ---- images to certify on ---------------------------------------------------------------------------------


def test_images_in(tmp_path: Path, photographs: list[Path]) -> None:
    assert default_images() == photographs
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CertificateError, match="expected a folder with images to certify on"):
            images_in(folder)
    for name in ("b.JPG", "a.png", "c.txt", "d.tiff"):
        (tmp_path / name).touch()
    assert [p.name for p in images_in(tmp_path)] == ["a.png", "b.JPG", "d.tiff"]
