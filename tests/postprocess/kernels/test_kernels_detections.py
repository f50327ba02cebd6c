"""The detection kernels against `select_candidates`, `nms` and `unletterbox_boxes`: equal, ties included.

On a CPU they run in Triton's interpreter (tests/conftest.py asks for it); where there is a CUDA device, on that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the kernels need torch: pip install 'visionfast[build]'")
pytest.importorskip("triton", reason="the kernels are written in Triton, which comes with torch")

from visionfast.errors import OptionError, ShapeError  # noqa: E402
from visionfast.postprocess.boxes import MAX_CANDIDATES, select_candidates, unletterbox_boxes  # noqa: E402
from visionfast.postprocess.kernels import detections as module  # noqa: E402
from visionfast.postprocess.kernels import layout  # noqa: E402
from visionfast.postprocess.kernels.detections import DetectionKernels  # noqa: E402
from visionfast.postprocess.nms import nms  # noqa: E402
from visionfast.preprocess.reference import letterbox_geometry  # noqa: E402
from visionfast.types import Letterbox  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Predictions = npt.NDArray[np.float32]
BUS = letterbox_geometry((1080, 810), (640, 640))


@dataclass(frozen=True)
class Setting:
    """What kernels are made with, and the definition is asked for."""

    num_classes: int
    conf: float = 0.25
    iou: float = 0.5
    max_det: int = 300
    classes: Sequence[int] | None = None
    class_agnostic: bool = False
    max_candidates: int = MAX_CANDIDATES

    def kernels(self, batch: int, anchors: int, coefficients: int = 0) -> DetectionKernels:
        made = DetectionKernels(batch=batch, anchors=anchors, coefficients=coefficients, device=DEVICE, **vars(self))
        for name, buffer in vars(made).items():
            if isinstance(buffer, torch.Tensor) and name not in ("_counts", "_wanted"):
                buffer.fill_(-1)  # what no kernel has written, none may read
        return made


def _definition(predictions: Predictions, letterbox: Letterbox | None, setting: Setting) -> tuple[layout.Found, int]:
    """One slot's objects, and the number of candidates."""
    if letterbox is None:
        letterbox, predictions = BUS, predictions[:, :0]
    candidates = select_candidates(
        predictions,
        setting.num_classes,
        conf=setting.conf,
        classes=setting.classes,
        max_candidates=setting.max_candidates,
    )
    kept = nms(
        candidates.xyxy,
        candidates.confidence,
        candidates.class_id,
        iou=setting.iou,
        max_det=setting.max_det,
        class_agnostic=setting.class_agnostic,
    )
    with np.errstate(over="ignore"):  # a corner near the end of float32 is clipped to the image like any other
        xyxy = unletterbox_boxes(candidates.xyxy[kept], letterbox)
    found = layout.Found(xyxy, candidates.confidence[kept], candidates.class_id[kept], candidates.anchor[kept])
    return found, len(candidates.anchor)


def _enqueue(kernels: DetectionKernels, predictions: Predictions, letterboxes: Sequence[Letterbox | None]) -> None:
    placement = np.empty((len(predictions), layout.COLUMNS), np.float32)
    layout.placement(letterboxes, placement)
    # The interpreter is NumPy, which warns of what a GPU does without a word.
    with np.errstate(all="ignore"):
        kernels.enqueue(torch.tensor(predictions, device=DEVICE), torch.tensor(placement, device=DEVICE))


def _check(
    kernels: DetectionKernels, predictions: Predictions, letterboxes: Sequence[Letterbox | None], setting: Setting
) -> list[layout.Found]:
    """Runs the kernels; every slot is as the definition has it."""
    _enqueue(kernels, predictions, letterboxes)
    rows = kernels.found.cpu().numpy()
    answers = []
    for slot, (image, letterbox) in enumerate(zip(predictions, letterboxes, strict=True)):
        expected, candidates = _definition(image, letterbox, setting)
        np.testing.assert_array_equal(rows[slot, 0], [len(expected.xyxy), candidates, 0, 0, 0, 0, 0, 0])
        found = layout.read_found(rows[slot])
        for name in ("anchor", "class_id", "confidence", "xyxy"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=f"slot {slot}: {name}")
        assert not rows[slot, 1 : 1 + len(found.xyxy), 7].any()
        answers.append(found)
    return answers


def _run(predictions: Predictions, letterboxes: Sequence[Letterbox | None], setting: Setting) -> list[layout.Found]:
    batch, rows, anchors = predictions.shape
    kernels = setting.kernels(batch, anchors, rows - 4 - setting.num_classes)
    return _check(kernels, predictions, letterboxes, setting)


def _predictions(boxes: npt.ArrayLike, scores: npt.ArrayLike) -> Predictions:
    """One slot: boxes (A, 4) as x1, y1, x2, y2 and scores (A, C)."""
    x1, y1, x2, y2 = np.asarray(boxes, np.float32).reshape(-1, 4).T
    cxcywh = np.stack(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1))
    return np.concatenate((cxcywh, np.asarray(scores, np.float32).reshape(len(x1), -1).T))[None]


# ---- anything that may come -------------------------------------------------------------------------------

NOT_FINITE = np.array([np.nan, np.inf, -np.inf], np.float32)


@st.composite
def _anything(draw: st.DrawFn) -> tuple[Predictions, list[Letterbox | None], Setting]:
    """Coarse grids, so that scores tie, boxes coincide and IoUs hit the threshold; and what is not a box at all."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, anchors = draw(st.integers(1, 3)), draw(st.integers(1, 300))
    num_classes, coefficients = draw(st.sampled_from([1, 2, 3, 5, 64, 65, 80])), draw(st.sampled_from([0, 2]))
    predictions = np.empty((batch, 4 + num_classes + coefficients, anchors), np.float32)
    spread = draw(st.sampled_from([2, 8, 60]))
    predictions[:, :2] = rng.integers(0, spread, (batch, 2, anchors)) * draw(st.sampled_from([1.0, 10.7]))
    predictions[:, 2:4] = rng.integers(-1, 6, (batch, 2, anchors)) * draw(st.sampled_from([1.0, 0.3, 25.9]))
    if draw(st.booleans()):
        scores = rng.integers(-1, 8, (batch, num_classes, anchors)) / 8
    else:
        scores = rng.random((batch, num_classes, anchors)) ** 8
    predictions[:, 4 : 4 + num_classes] = scores
    predictions[:, 4 + num_classes :] = np.nan  # coefficients are no business of these kernels
    if draw(st.booleans()):
        rare = rng.random((batch, 4 + num_classes, anchors)) < 0.3 / (4 + num_classes)
        predictions[:, : 4 + num_classes][rare] = rng.choice(NOT_FINITE, int(rare.sum()))
    if draw(st.booleans()):
        rare = rng.random((batch, 4, anchors)) < 0.1
        predictions[:, :4][rare] = rng.choice(np.float32([3e38, -3e38, 1e20, 1e-30, 0.0]), int(rare.sum()))
    sizes = st.tuples(st.integers(1, 3000), st.integers(1, 3000))
    letterboxes = [letterbox_geometry(draw(sizes), (64, 96)) if draw(st.integers(0, 5)) else None for _ in range(batch)]
    setting = Setting(
        num_classes=num_classes,
        conf=draw(st.sampled_from([0.0, 0.001, 0.125, 0.25, 0.3, 0.875, 1.0])),
        iou=draw(st.sampled_from([0.0, 1e-46, 0.2, 1 / 3, 0.5, 0.6, 0.7, 1.0])),
        max_det=draw(st.sampled_from([1, 2, 7, 64, 300, 1000])),
        classes=draw(st.none() | st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=4)),
        class_agnostic=draw(st.booleans()),
        max_candidates=draw(st.sampled_from([1, 50, 129, MAX_CANDIDATES])),
    )
    return predictions, letterboxes, setting


@given(case=_anything(), block=st.sampled_from([64, 256]), max_side=st.sampled_from([256, 4096]))
@settings(max_examples=100, deadline=None)
def test_kernels_equal_definition(case: Any, block: int, max_side: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)  # several steps from few candidates,
        patch.setattr(module, "_MAX_SIDE", max_side)  # some of them beyond the square
        _run(*case)


@given(case=_anything())
@settings(max_examples=10, deadline=None)
def test_with_the_gpus_tiles(case: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_INTERPRETER", module._GPU)
        _run(*case)


# ---- one by one -------------------------------------------------------------------------------------------


def test_no_candidate() -> None:
    setting = Setting(3)
    assert len(_run(np.zeros((1, 7, 5), np.float32), [BUS], setting)[0].xyxy) == 0


def test_no_image_has_no_objects() -> None:
    certain = _predictions([[0, 0, 10, 10]], [[0.9]])
    first, second, third = _run(np.repeat(certain, 3, axis=0), [None, BUS, None], Setting(1))
    assert (len(first.xyxy), len(second.xyxy), len(third.xyxy)) == (0, 1, 0)


def test_ties_go_by_anchor_and_by_lowest_class() -> None:
    apart = [[20 * i, 0, 20 * i + 10, 10] for i in range(40)]
    (found,) = _run(_predictions(apart, np.full((40, 5), 0.5)), [BUS], Setting(5, max_det=30))
    np.testing.assert_array_equal(found.anchor, np.arange(30))
    assert not found.class_id.any()


def test_of_identical_boxes_the_first_stays() -> None:
    (found,) = _run(_predictions([[5, 5, 50, 50]] * 600, np.full((600, 1), 0.5)), [BUS], Setting(1))
    np.testing.assert_array_equal(found.anchor, [0])


def test_boxes_without_area_neither_suppress_nor_are_suppressed() -> None:
    boxes = [[10, 10, 10, 10]] * 3 + [[0, 0, 20, 20]] * 2 + [[10, 0, 10, 20]] * 2
    (found,) = _run(_predictions(boxes, np.full((7, 1), 0.5)), [BUS], Setting(1, iou=0.0))
    np.testing.assert_array_equal(found.anchor, [0, 1, 2, 3, 5, 6])


@pytest.mark.parametrize("max_side", [256, 4096])
def test_chain_in_which_each_box_overlaps_the_next(max_side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second one stays; no round of the search can know of more than one link."""
    monkeypatch.setattr(module, "_MAX_SIDE", max_side)
    boxes = [[4 * i, 0, 4 * i + 10, 10] for i in range(600)]  # IoU 6 / 14 with the next, 2 / 18 with the one after
    scores = np.linspace(0.9, 0.3, 600)[:, None]
    (found,) = _run(_predictions(boxes, scores), [BUS], Setting(1, iou=0.4, max_det=1000))
    np.testing.assert_array_equal(found.anchor, np.arange(0, 600, 2))


@pytest.mark.parametrize(("iou", "left"), [(0.5, 2), (np.nextafter(0.5, 0), 1), (0.7, 2), (0.7000001, 2)])
def test_iou_of_just_the_threshold_is_not_above_it(iou: float, left: int) -> None:
    """0.7 is no float32: the IoU is the one just below, and so must be what it is compared with."""
    height = 5 if iou < 0.6 else 7
    boxes = _predictions([[0, 0, 10, 10], [0, 0, 10, height]], [[0.9], [0.8]])
    assert len(_run(boxes, [BUS], Setting(1, iou=iou))[0].xyxy) == left


def test_scores_at_and_just_above_conf() -> None:
    conf = np.float32(0.3)
    scores = [conf, np.nextafter(conf, np.float32(1)), np.nextafter(conf, np.float32(0))]
    boxes = [[0, 0, 5, 5], [20, 0, 25, 5], [40, 0, 45, 5]]
    (found,) = _run(_predictions(boxes, [[s] for s in scores]), [BUS], Setting(1, conf=0.3))
    np.testing.assert_array_equal(found.anchor, [1])


def test_smallest_positive_score_at_conf_0() -> None:
    tiny = np.float32(1e-45)  # subnormal: a GPU that flushed it to zero would drop it
    (found,) = _run(_predictions([[0, 0, 5, 5]], [[tiny]]), [BUS], Setting(1, conf=0.0))
    np.testing.assert_array_equal(found.confidence, [tiny])


@pytest.mark.parametrize("bad", NOT_FINITE.tolist())
@pytest.mark.parametrize("row", range(6))
def test_anchor_that_is_not_finite_is_dropped(row: int, bad: float) -> None:
    predictions = _predictions([[0, 0, 5, 5], [20, 0, 25, 5]], [[0.5, 0.9], [0.5, 0.9]])
    predictions[0, row, 0] = bad
    (found,) = _run(predictions, [BUS], Setting(2))
    # minus infinity is only the score of a class that is certainly not there
    expected = [1] if row < 4 or bad != -np.inf else [0, 1] if row == 4 else [1, 0]
    np.testing.assert_array_equal(found.anchor, expected)


@pytest.mark.parametrize("centre", [3e38, -3e38])
@pytest.mark.parametrize("axis", [0, 1])
def test_anchor_with_one_corner_beyond_float32_is_dropped(axis: int, centre: float) -> None:
    predictions = _predictions([[0, 0, 5, 5], [20, 0, 25, 5]], [[0.5], [0.5]])
    predictions[0, [axis, 2 + axis], 0] = centre, 3e38  # the other corner is at half of it
    (found,) = _run(predictions, [BUS], Setting(1))
    np.testing.assert_array_equal(found.anchor, [1])


def test_only_asked_for_classes() -> None:
    boxes = [[20 * i, 0, 20 * i + 10, 10] for i in range(6)]
    (found,) = _run(_predictions(boxes, np.eye(6) * 0.9), [BUS], Setting(6, classes=[4, 1]))
    np.testing.assert_array_equal(found.class_id, [1, 4])


def test_boxes_partly_and_wholly_outside_are_clipped() -> None:
    boxes = [[-50, -50, 30, 30], [600, 600, 900, 700], [-90, 10, -60, 40], [900, 900, 950, 950]]
    (found,) = _run(_predictions(boxes, np.full((4, 1), 0.5)), [BUS], Setting(1))
    assert len(found.xyxy) == 4
    assert (found.xyxy >= 0).all()
    assert (found.xyxy <= [810, 1080, 810, 1080]).all()


# ---- whole sizes ------------------------------------------------------------------------------------------


def _crowd(rng: np.random.Generator, anchors: int, num_classes: int, objects: int, around: int) -> Predictions:
    """One slot as a detector gives it: most anchors see nothing; `around` of them see each object, a little off."""
    predictions = np.empty((1, 4 + num_classes, anchors), np.float32)
    predictions[0, :4] = rng.uniform(0, 640, (4, anchors))
    predictions[0, 4:] = rng.random((num_classes, anchors)) * 0.01
    for anchor in rng.permutation(anchors)[: objects * around].reshape(objects, around):
        box = np.concatenate((rng.uniform(50, 590, 2), rng.uniform(20, 120, 2)))
        predictions[0, :4, anchor] = box + rng.normal(0, 3, (around, 4))
        predictions[0, 4 + rng.integers(num_classes), anchor] = rng.uniform(0.2, 0.95, around)
    return predictions


@pytest.mark.parametrize(
    ("anchors", "num_classes", "objects", "around"), [(8400, 80, 400, 6), (33600, 80, 50, 8), (8400, 1000, 30, 10)]
)
def test_whole_sizes(anchors: int, num_classes: int, objects: int, around: int) -> None:
    predictions = _crowd(np.random.default_rng(0), anchors, num_classes, objects, around)
    (found,) = _run(predictions, [BUS], Setting(num_classes, iou=0.7))
    assert len(found.xyxy) >= min(objects, 300)


def test_every_anchor_a_candidate() -> None:
    """More candidates than the square of pairs holds, none of which suppresses another before it is full."""
    rng = np.random.default_rng(1)
    predictions = np.empty((1, 5, 5000), np.float32)
    predictions[:, :2] = rng.uniform(0, 640, (1, 2, 5000))
    predictions[:, 2:4] = rng.uniform(1, 40, (1, 2, 5000))
    predictions[:, 4] = rng.uniform(0.3, 1, (1, 5000))
    (found,) = _run(predictions, [BUS], Setting(1, iou=0.05, max_det=2000))
    assert 300 < len(found.xyxy) < 2000  # so that it went on to the last candidate


def test_more_candidates_than_nms_looks_at() -> None:
    predictions = _crowd(np.random.default_rng(2), 400, 3, 20, 10)
    predictions[:, 4:] = np.round(predictions[:, 4:], 1)  # ties across the cut
    _run(predictions, [BUS], Setting(3, conf=0.1, max_candidates=77))


def test_batch_of_32_of_images_of_every_size() -> None:
    rng = np.random.default_rng(3)
    predictions = np.concatenate([_crowd(rng, 300, 4, slot, 5) for slot in range(32)])
    letterboxes = [letterbox_geometry((1 + 97 * slot, 3000 - 90 * slot), (640, 640)) for slot in range(32)]
    found = _run(predictions, letterboxes, Setting(4))
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
        for found in _run(predictions, letterboxes, setting):
            assert len(found.xyxy) >= least


# ---- buffers ----------------------------------------------------------------------------------------------


def test_nothing_is_left_behind_and_nothing_is_allocated() -> None:
    setting = Setting(4, max_det=50)
    kernels = setting.kernels(batch=2, anchors=300)
    held = {name: value.data_ptr() for name, value in vars(kernels).items() if isinstance(value, torch.Tensor)}
    assert len(held) >= 10
    rng = np.random.default_rng(4)
    many = np.concatenate([_crowd(rng, 300, 4, 40, 7), _crowd(rng, 300, 4, 3, 9)])
    few = np.concatenate([_crowd(rng, 300, 4, 1, 4), _crowd(rng, 300, 4, 60, 5)])
    small = letterbox_geometry((33, 17), (640, 640))
    for predictions, letterboxes in (
        (many, [BUS, BUS]),
        (few, [small, BUS]),
        (many, [None, small]),
        (many, [BUS, BUS]),
    ):
        _check(kernels, predictions, letterboxes, setting)
    now = {name: value.data_ptr() for name, value in vars(kernels).items() if isinstance(value, torch.Tensor)}
    assert now == held


def test_inputs_are_left_as_they_were() -> None:
    setting = Setting(2)
    predictions = torch.tensor(_crowd(np.random.default_rng(5), 50, 2, 5, 3), device=DEVICE)
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
        images = np.concatenate([_crowd(rng, 300, 4, int(n), 5) for n in rng.integers(0, 60, 2)])
        predictions.copy_(torch.tensor(images))
        graph.replay()
        rows = kernels.found.cpu().numpy()
        for slot, image in enumerate(images):
            expected, candidates = _definition(image, BUS, setting)
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
