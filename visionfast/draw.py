"""Detections drawn into a picture, by supervision's annotators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.results import Detections

__all__ = ["draw"]

_MASK_OPACITY = 0.45


def draw(image_rgb: npt.NDArray[np.uint8], detections: Detections, class_names: Sequence[str]) -> npt.NDArray[np.uint8]:
    """A copy of the picture with masks, boxes and labels; one colour a class, line and text by resolution.

    Args:
        image_rgb: (H, W, 3) uint8, the image the detections belong to.
        detections: in its pixels.
        class_names: index = class id; a class id beyond them is labelled by its number.

    Returns:
        (H, W, 3) uint8 RGB.

    Raises:
        ShapeError: the image is not (H, W, 3) uint8, or not of the detections' size.
    """
    if image_rgb.shape != (*detections.image_hw, 3) or image_rgb.dtype != np.uint8:
        raise ShapeError(
            f"image_rgb: expected {(*detections.image_hw, 3)} uint8, got {image_rgb.shape} {image_rgb.dtype.name}"
        )
    if len(detections) == 0:
        return image_rgb.copy()
    import supervision as sv

    height, width = detections.image_hw
    thickness = sv.calculate_optimal_line_thickness(resolution_wh=(width, height))
    text_scale = sv.calculate_optimal_text_scale(resolution_wh=(width, height))
    scene = np.ascontiguousarray(image_rgb[..., ::-1])  # supervision paints BGR
    _paint_masks(scene, detections)
    boxes = sv.Detections(
        xyxy=detections.xyxy.copy(),
        confidence=detections.confidence.copy(),
        class_id=detections.class_id.copy(),
    )
    scene = sv.BoxAnnotator(thickness=thickness).annotate(scene, boxes)
    scene = sv.LabelAnnotator(
        text_scale=text_scale,
        text_thickness=max(1, thickness // 2),
        text_padding=max(2, round(10 * text_scale)),
        # Keeps labels inside the picture and apart. Quadratic (0.5 s for 300), and in a crowd nothing helps.
        smart_position=len(detections) <= 300,
    ).annotate(scene, boxes, labels=_labels(detections, class_names))
    return np.ascontiguousarray(scene[..., ::-1])


def _labels(detections: Detections, class_names: Sequence[str]) -> list[str]:
    return [
        f"{class_names[c] if c < len(class_names) else c} {confidence:.2f}"
        for c, confidence in zip(detections.class_id.tolist(), detections.confidence.tolist(), strict=True)
    ]


def _paint_masks(scene_bgr: npt.NDArray[np.uint8], detections: Detections) -> None:
    """Tints each object's pixels in place: the largest object first, one dense plane at a time."""
    if detections.mask is None:
        return
    import cv2
    import supervision as sv

    tint = scene_bgr.copy()
    extents = detections.mask.xywh().tolist()
    for i in np.argsort(-detections.mask.area(), kind="stable").tolist():
        left, top, width, height = extents[i]
        inside = np.s_[top : top + height, left : left + width]
        color = sv.ColorPalette.DEFAULT.by_idx(int(detections.class_id[i])).as_bgr()
        tint[inside][detections.mask[[i]].dense()[0][inside]] = color
    cv2.addWeighted(scene_bgr, 1 - _MASK_OPACITY, tint, _MASK_OPACITY, 0, dst=scene_bgr)
