"""What the detection kernels are held against: `select_candidates`, `nms` and `unletterbox_boxes`.

On a CPU the kernels run in Triton's interpreter (tests/conftest.py asks for it); where there is a CUDA device, on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch: pip install 'visionfast[build]'")
pytest.importorskip("triton", reason="the kernels are written in Triton, which comes with torch")

from visionfast.postprocess.boxes import MAX_CANDIDATES, select_candidates, unletterbox_boxes  # noqa: E402
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


def definition(predictions: Predictions, letterbox: Letterbox | None, setting: Setting) -> tuple[layout.Found, int]:
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


def enqueue(kernels: DetectionKernels, predictions: Predictions, letterboxes: Sequence[Letterbox | None]) -> None:
    placement = np.empty((len(predictions), layout.COLUMNS), np.float32)
    layout.placement(letterboxes, placement)
    # The interpreter is NumPy, which warns of what a GPU does without a word.
    with np.errstate(all="ignore"):
        kernels.enqueue(torch.tensor(predictions, device=DEVICE), torch.tensor(placement, device=DEVICE))


def check(
    kernels: DetectionKernels, predictions: Predictions, letterboxes: Sequence[Letterbox | None], setting: Setting
) -> list[layout.Found]:
    """Runs the kernels; every slot is as the definition has it."""
    enqueue(kernels, predictions, letterboxes)
    rows = kernels.found.cpu().numpy()
    answers = []
    for slot, (image, letterbox) in enumerate(zip(predictions, letterboxes, strict=True)):
        expected, candidates = definition(image, letterbox, setting)
        np.testing.assert_array_equal(rows[slot, 0], [len(expected.xyxy), candidates, 0, 0, 0, 0, 0, 0])
        found = layout.read_found(rows[slot])
        for name in ("anchor", "class_id", "confidence", "xyxy"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=f"slot {slot}: {name}")
        assert not rows[slot, 1 : 1 + len(found.xyxy), 7].any()
        answers.append(found)
    return answers


def run(predictions: Predictions, letterboxes: Sequence[Letterbox | None], setting: Setting) -> list[layout.Found]:
    batch, rows, anchors = predictions.shape
    kernels = setting.kernels(batch, anchors, rows - 4 - setting.num_classes)
    return check(kernels, predictions, letterboxes, setting)


def predictions_of(boxes: npt.ArrayLike, scores: npt.ArrayLike) -> Predictions:
    """One slot: boxes (A, 4) as x1, y1, x2, y2 and scores (A, C)."""
    x1, y1, x2, y2 = np.asarray(boxes, np.float32).reshape(-1, 4).T
    cxcywh = np.stack(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1))
    return np.concatenate((cxcywh, np.asarray(scores, np.float32).reshape(len(x1), -1).T))[None]


def crowd(rng: np.random.Generator, anchors: int, num_classes: int, objects: int, around: int) -> Predictions:
    """One slot as a detector gives it: most anchors see nothing; `around` of them see each object, a little off."""
    predictions = np.empty((1, 4 + num_classes, anchors), np.float32)
    predictions[0, :4] = rng.uniform(0, 640, (4, anchors))
    predictions[0, 4:] = rng.random((num_classes, anchors)) * 0.01
    for anchor in rng.permutation(anchors)[: objects * around].reshape(objects, around):
        box = np.concatenate((rng.uniform(50, 590, 2), rng.uniform(20, 120, 2)))
        predictions[0, :4, anchor] = box + rng.normal(0, 3, (around, 4))
        predictions[0, 4 + rng.integers(num_classes), anchor] = rng.uniform(0.2, 0.95, around)
    return predictions
