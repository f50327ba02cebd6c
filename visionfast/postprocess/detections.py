"""One image's raw tensors → `Detections`: filter, suppress, un-letterbox, decode masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from visionfast.errors import OptionError, ShapeError
from visionfast.postprocess.boxes import select_candidates, unletterbox_boxes
from visionfast.postprocess.nms import nms
from visionfast.postprocess.prototypes import decode_masks
from visionfast.results import Detections
from visionfast.types import FloatArray, Letterbox

__all__ = ["check_options", "postprocess"]


def postprocess(
    predictions: npt.NDArray[np.float32],
    letterbox: Letterbox,
    *,
    num_classes: int,
    conf: float = 0.25,
    iou: float = 0.7,
    max_det: int = 300,
    classes: Sequence[int] | None = None,
    class_agnostic: bool = False,
    prototypes: FloatArray | None = None,
) -> Detections:
    """The objects in one image, from what the engine gave for it. The same answer as ultralytics' predict.

    Suppression happens in input pixels, before boxes are clipped to the image. Of a segmenter's objects those
    whose mask has no pixel inside their box are dropped, as ultralytics does.

    Args:
        predictions: (4 + C + M, A) float32: cx, cy, w, h in input pixels, C class scores, M mask
            coefficients.
        letterbox: where the image lies in the input.
        num_classes: C.
        conf: objects above this confidence, 0..1.
        iou: of two boxes of one class that overlap more than this, 0..1, the less confident one goes.
        max_det: objects at most, the most confident ones.
        classes: only these class ids; `None`: all.
        class_agnostic: boxes of different classes suppress one another too.
        prototypes: (M, h / s, w / s) float32 or float16; `None` for a detector (M = 0).

    Returns:
        N objects by descending confidence. They share no memory with the arguments.

    Raises:
        OptionError: an option is out of its range.
        ShapeError: a tensor's shape or dtype is not the one above.
    """
    check_options(num_classes=num_classes, conf=conf, iou=iou, max_det=max_det, classes=classes)
    _check_tensors(predictions, prototypes, num_classes)

    candidates = select_candidates(predictions, num_classes, conf=conf, classes=classes)
    kept = nms(
        candidates.xyxy,
        candidates.confidence,
        candidates.class_id,
        iou=iou,
        max_det=max_det,
        class_agnostic=class_agnostic,
    )
    xyxy = unletterbox_boxes(candidates.xyxy[kept], letterbox)
    mask = None
    if prototypes is not None:
        coefficients = predictions[4 + num_classes :].T[candidates.anchor[kept]]  # (N, M)
        mask = decode_masks(prototypes, coefficients, xyxy, letterbox)
        visible = np.flatnonzero(mask.area())
        if len(visible) < len(kept):
            kept, xyxy, mask = kept[visible], xyxy[visible], mask[visible]
    return Detections(
        xyxy=xyxy,
        confidence=candidates.confidence[kept],
        class_id=candidates.class_id[kept],
        image_hw=letterbox.image_hw,
        mask=mask,
    )


def check_options(
    *, num_classes: int, conf: float, iou: float, max_det: int, classes: Sequence[int] | None = None
) -> None:
    """Raises `OptionError` for the first option that is out of its range."""
    for name, value in (("conf", conf), ("iou", iou)):
        if not 0 <= value <= 1:
            raise OptionError(f"{name}: expected a number from 0 to 1, got {value}")
    if max_det < 1:
        raise OptionError(f"max_det: expected at least 1, got {max_det}")
    if classes is not None:
        if len(classes) == 0:
            raise OptionError("classes: expected at least one class id, got none; leave it out for all classes")
        unknown = [c for c in classes if not 0 <= c < num_classes]
        if unknown:
            raise OptionError(f"classes: expected ids from 0 to {num_classes - 1}, got {unknown[0]}")


def _check_tensors(predictions: npt.NDArray[np.float32], prototypes: FloatArray | None, num_classes: int) -> None:
    if prototypes is not None and (prototypes.ndim != 3 or prototypes.dtype not in (np.float32, np.float16)):
        raise ShapeError(
            f"prototypes: expected (M, mh, mw) float32 or float16 of one image, "
            f"got {prototypes.shape} {prototypes.dtype.name}"
        )
    rows = 4 + num_classes + (0 if prototypes is None else len(prototypes))
    if predictions.ndim != 2 or len(predictions) != rows or predictions.dtype != np.float32:
        raise ShapeError(
            f"predictions: expected ({rows}, A) float32 for {num_classes} classes, one image, "
            f"{'no prototypes' if prototypes is None else f'{len(prototypes)} prototypes'}, "
            f"got {predictions.shape} {predictions.dtype.name}"
        )
