"""The whole of post-processing: its contract, and parity with ultralytics on the same raw tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from visionfast.errors import OptionError, ShapeError
from visionfast.postprocess import InstanceMasks, mask_iou, postprocess
from visionfast.postprocess.nms import box_iou
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.results import Detections
from visionfast.types import Letterbox

SQUARE = letterbox_geometry((480, 640), (640, 640))


def _crowd(seed: int, num_classes: int, extra: int = 0, anchors: int = 3000) -> np.ndarray:
    """(4 + C + M, A): clusters of boxes that overlap each other a lot, some of them wider than the input."""
    rng = np.random.default_rng(seed)
    centres, sizes = rng.uniform(0, 640, (60, 2)), rng.uniform(5, 300, (60, 2))
    member = rng.integers(0, 60, anchors)
    boxes = np.concatenate((centres[member], sizes[member]), axis=1) + rng.normal(0, 6, (anchors, 4))
    boxes[:, 2:] = np.abs(boxes[:, 2:])
    boxes = np.round(boxes * 16) / 16  # ultralytics adds 7680 × class id in float32: let that cost no bits
    scores = rng.random((anchors, num_classes)) ** 6
    coefficients = rng.normal(0, 1, (anchors, extra))
    return np.ascontiguousarray(np.concatenate((boxes, scores, coefficients), axis=1).T.astype(np.float32))


def _smooth_prototypes(seed: int) -> np.ndarray:
    """(32, 160, 160) of low spatial frequency, as a trained network's."""
    cv2 = pytest.importorskip("cv2")
    rng = np.random.default_rng(seed)
    return np.stack([cv2.resize(rng.normal(0, 1, (9, 9)).astype(np.float32), (160, 160)) for _ in range(32)])


def _ultralytics(
    predictions: np.ndarray,
    letterbox: Letterbox,
    num_classes: int,
    prototypes: np.ndarray | None = None,
    *,
    conf: float = 0.25,
    iou: float = 0.7,
    max_det: int = 300,
    classes: list[int] | None = None,
    class_agnostic: bool = False,
) -> Detections:
    """What ultralytics' predictors do after the network (`retina_masks=True`)."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    nms = pytest.importorskip("ultralytics.utils.nms")
    from ultralytics.utils import ops

    found = nms.non_max_suppression(
        torch.from_numpy(predictions.copy())[None],
        conf,
        iou,
        classes=classes,
        agnostic=class_agnostic,
        max_det=max_det,
        nc=num_classes,
        max_time_img=60,
    )[0]
    found[:, :4] = ops.scale_boxes(letterbox.size_hw, found[:, :4], letterbox.image_hw)
    masks = None
    if prototypes is not None:
        dense = ops.process_mask_native(torch.from_numpy(prototypes), found[:, 6:], found[:, :4], letterbox.image_hw)
        visible = dense.amax((-2, -1)) > 0
        found, masks = found[visible], InstanceMasks.from_dense(dense[visible].numpy())
    return Detections(
        xyxy=found[:, :4].numpy(),
        confidence=found[:, 4].numpy(),
        class_id=found[:, 5].numpy().astype(np.int64),
        image_hw=letterbox.image_hw,
        mask=masks,
    )


def _assert_parity(ours: Detections, theirs: Detections) -> None:
    assert len(ours) == len(theirs)
    np.testing.assert_array_equal(ours.class_id, theirs.class_id)
    np.testing.assert_array_equal(ours.confidence, theirs.confidence)
    np.testing.assert_allclose(ours.xyxy, theirs.xyxy, rtol=0, atol=1e-4)
    iou = np.diag(box_iou(ours.xyxy, theirs.xyxy))
    has_area = (theirs.xyxy[:, 2:] > theirs.xyxy[:, :2]).all(axis=1)
    assert (iou[has_area] >= 0.99).all()
    assert (ours.mask is None) == (theirs.mask is None)
    if ours.mask is not None and theirs.mask is not None:
        shared = np.diag(mask_iou(ours.mask, theirs.mask))
        # A pixel's logit may be 0 within rounding, which weighs something in a mask of a few pixels only.
        assert (shared[theirs.mask.area() >= 64] >= 0.98).all()
        assert shared.mean() >= 0.999


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"conf": 0.001},
        {"conf": 0.001, "max_det": 7},
        {"iou": 0.0},
        {"iou": 0.45, "class_agnostic": True},
        {"classes": [0, 2]},
        {"conf": 1.0},
    ],
)
@pytest.mark.parametrize("image_hw", [(480, 640), (1080, 811), (64, 3000)])
def test_crowds_equal_ultralytics(options: dict[str, Any], image_hw: tuple[int, int]) -> None:
    letterbox = letterbox_geometry(image_hw, (640, 640))
    predictions = _crowd(seed=image_hw[0], num_classes=5)
    ours = postprocess(predictions, letterbox, num_classes=5, **options)
    _assert_parity(ours, _ultralytics(predictions, letterbox, 5, **options))


def test_where_ultralytics_loses_bits_the_exact_iou_decides() -> None:
    # IoU 0.6999994. Moved by 2 × 7680 px, as ultralytics keeps classes apart, it becomes 0.700009 in float32.
    predictions = np.zeros((4 + 3, 2), np.float32)
    predictions[:4, 0] = 439.42337036, 126.29242706, 147.81669617, 52.94608688
    predictions[:4, 1] = 445.21343994, 134.15345764, 141.76881409, 70.86978149
    predictions[6] = 0.9, 0.93
    assert len(postprocess(predictions, SQUARE, num_classes=3, iou=0.7)) == 2
    assert len(_ultralytics(predictions, SQUARE, 3, iou=0.7)) == 1


@pytest.mark.parametrize("image_hw", [(480, 640), (427, 640), (333, 500), (1500, 211)])
def test_crowds_with_masks_equal_ultralytics(image_hw: tuple[int, int]) -> None:
    letterbox = letterbox_geometry(image_hw, (640, 640))
    predictions, prototypes = _crowd(1, 3, extra=32, anchors=800), _smooth_prototypes(1)
    ours = postprocess(predictions, letterbox, num_classes=3, prototypes=prototypes)
    assert len(ours) > 20
    _assert_parity(ours, _ultralytics(predictions, letterbox, 3, prototypes))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("photograph", [0, 1])
@pytest.mark.parametrize("architecture", ["yolov8n.yaml", "yolov8n-seg.yaml"])
def test_a_seeded_network_equals_ultralytics(architecture: str, photograph: int, photographs: list[Path]) -> None:
    torch = pytest.importorskip("torch")
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    cv2 = pytest.importorskip("cv2")
    image = cv2.imread(str(photographs[photograph]))[..., ::-1]
    letterbox = letterbox_geometry(image.shape[:2], (640, 640))
    canvas = np.full((640, 640, 3), 114, np.uint8)
    height, width = letterbox.resized_hw
    canvas[letterbox.top : letterbox.top + height, letterbox.left : letterbox.left + width] = cv2.resize(
        image, (width, height)
    )

    torch.manual_seed(0)
    segments = "seg" in architecture
    model = (tasks.SegmentationModel if segments else tasks.DetectionModel)(architecture, verbose=False).eval()
    with torch.no_grad():
        images = torch.from_numpy(canvas).permute(2, 0, 1)[None] / 255
        # An untrained network's signal dies out unless its batch norms know the picture's statistics, and its
        # head is sure of nothing.
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()(images)
        for branch in model.model[-1].cv3:
            branch[-1].weight *= 3
            branch[-1].bias += 6
        raw = model.eval()(images)[0]
    predictions, prototypes = raw if segments else (raw, None)
    predictions = predictions[0].numpy()
    prototypes = None if prototypes is None else prototypes[0].numpy()
    best = predictions[4:84].max(axis=0)
    conf = float(np.quantile(best, 0.9))
    assert len(np.unique(best)) > 1000

    ours = postprocess(predictions, letterbox, num_classes=80, conf=conf, prototypes=prototypes)
    assert len(ours) > 20
    _assert_parity(ours, _ultralytics(predictions, letterbox, 80, prototypes, conf=conf))


def test_half_precision_prototypes() -> None:
    predictions, prototypes = _crowd(2, 3, extra=32, anchors=300), _smooth_prototypes(2).astype(np.float16)
    half = postprocess(predictions, SQUARE, num_classes=3, prototypes=prototypes)
    full = postprocess(predictions, SQUARE, num_classes=3, prototypes=prototypes.astype(np.float32))
    assert half.mask == full.mask


@pytest.mark.parametrize("segments", [False, True])
def test_nothing_found(segments: bool) -> None:
    prototypes = np.zeros((32, 160, 160), np.float32) if segments else None
    for anchors in (0, 10):
        predictions = np.zeros((4 + 2 + 32 * segments, anchors), np.float32)
        found = postprocess(predictions, SQUARE, num_classes=2, prototypes=prototypes)
        assert found.xyxy.shape == (0, 4)
        assert found.xyxy.dtype == found.confidence.dtype == np.float32
        assert found.class_id.dtype == np.int64
        assert found.image_hw == (480, 640)
        assert found.mask == (InstanceMasks((), (480, 640)) if segments else None)


def test_garbage_never_survives_and_never_crashes() -> None:
    rng = np.random.default_rng(0)
    predictions = _crowd(3, 4, extra=32, anchors=500)
    for value in (np.nan, np.inf, -np.inf, 3e38, -3e38):
        predictions[rng.integers(0, len(predictions), 200), rng.integers(0, 500, 200)] = value
    found = postprocess(predictions, SQUARE, num_classes=4, conf=0.01, prototypes=_smooth_prototypes(3))
    assert len(found) > 10
    assert np.isfinite(found.xyxy).all()
    assert np.isfinite(found.confidence).all()
    assert (found.xyxy >= 0).all()
    assert (found.xyxy <= [640, 480, 640, 480]).all()


def test_an_object_without_a_mask_pixel_is_dropped() -> None:
    predictions = np.zeros((4 + 1 + 1, 2), np.float32)
    predictions[:4] = [[100, 300], [300, 300], [50, 50], [50, 50]]
    predictions[4], predictions[5] = [0.9, 0.8], [-1, 1]
    found = postprocess(predictions, SQUARE, num_classes=1, prototypes=np.ones((1, 160, 160), np.float32))
    assert found.confidence.tolist() == [np.float32(0.8)]
    assert found.mask is not None
    assert found.mask.area().tolist() == [50 * 50]


def test_results_own_their_memory() -> None:
    predictions, prototypes = _crowd(4, 3, extra=32, anchors=300), _smooth_prototypes(4)
    found = postprocess(predictions, SQUARE, num_classes=3, prototypes=prototypes)
    assert found.mask is not None
    before = (found.xyxy.copy(), found.confidence.copy(), found.class_id.copy(), found.mask.dense())
    predictions[:], prototypes[:] = 7, 7
    for array, copy in zip((found.xyxy, found.confidence, found.class_id, found.mask.dense()), before, strict=True):
        np.testing.assert_array_equal(array, copy)
        assert not np.shares_memory(array, predictions)


def test_arguments_are_left_as_they_were() -> None:
    predictions, prototypes = _crowd(5, 3, extra=32, anchors=300), _smooth_prototypes(5)
    copies = predictions.copy(), prototypes.copy()
    for array in (predictions, prototypes):
        array.flags.writeable = False
    postprocess(predictions, SQUARE, num_classes=3, prototypes=prototypes)
    np.testing.assert_array_equal(predictions, copies[0])
    np.testing.assert_array_equal(prototypes, copies[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conf": 1.01}, "conf: expected a number from 0 to 1, got 1.01"),
        ({"conf": float("nan")}, "conf: expected a number from 0 to 1, got nan"),
        ({"iou": -0.1}, "iou: expected a number from 0 to 1, got -0.1"),
        ({"max_det": 0}, "max_det: expected at least 1, got 0"),
        ({"classes": [0, 3]}, "classes: expected ids from 0 to 2, got 3"),
        ({"classes": [-1]}, "classes: expected ids from 0 to 2, got -1"),
        ({"classes": []}, "classes: expected at least one class id"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        postprocess(np.zeros((7, 5), np.float32), SQUARE, num_classes=3, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("predictions", "prototypes"),
    [
        (np.zeros((1, 7, 5), np.float32), None),
        (np.zeros((8, 5), np.float32), None),
        (np.zeros((7, 5), np.float64), None),
        (np.zeros((7, 5), np.float32), np.zeros((32, 160, 160), np.float32)),
        (np.zeros((39, 5), np.float32), np.zeros((1, 32, 160, 160), np.float32)),
        (np.zeros((39, 5), np.float32), np.zeros((32, 160, 160), np.int8)),
        (np.zeros((39, 5), np.float32), np.zeros((32, 150, 160), np.float32)),
    ],
)
def test_tensors_that_do_not_fit(predictions: np.ndarray, prototypes: np.ndarray | None) -> None:
    with pytest.raises(ShapeError, match=r"expected .* got"):
        postprocess(predictions, SQUARE, num_classes=3, prototypes=prototypes)
