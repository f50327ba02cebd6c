"""Answers drawn into a picture: a detector's objects by supervision's annotators, and the masks of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.postprocess.masks import InstanceMasks
from visionfast.results import Detections, Masks

if TYPE_CHECKING:
    import supervision as sv

__all__ = ["draw", "draw_everything", "draw_prompts", "mask_colors"]

_MASK_OPACITY = 0.45
_HUE_STEP = 360 * 0.381966  # the golden angle: hues of any number of masks lie apart, neighbours furthest
_POSITIVE, _NEGATIVE, _WHITE = (46, 204, 64), (255, 65, 54), (255, 255, 255)  # RGB


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
    _check(image_rgb, detections.image_hw)
    if len(detections) == 0:
        return image_rgb.copy()
    import supervision as sv

    scene = np.ascontiguousarray(image_rgb[..., ::-1])  # supervision paints BGR
    palette = sv.ColorPalette.DEFAULT
    if detections.mask is not None:
        _tint(scene, detections.mask, [palette.by_idx(c).as_bgr() for c in detections.class_id.tolist()])
    boxes = sv.Detections(
        xyxy=detections.xyxy.copy(),
        confidence=detections.confidence.copy(),
        class_id=detections.class_id.copy(),
    )
    scene = sv.BoxAnnotator(thickness=_thickness(detections.image_hw)).annotate(scene, boxes)
    scene = _label(scene, boxes, _class_labels(detections, class_names), palette)
    return np.ascontiguousarray(scene[..., ::-1])


def draw_prompts(
    image_rgb: npt.NDArray[np.uint8],
    masks: Masks,
    *,
    points: npt.ArrayLike = (),
    boxes: npt.ArrayLike = (),
) -> npt.NDArray[np.uint8]:
    """A copy of the picture with the prompts and their masks, one colour a prompt, and a score on each box or mask.

    Where prompts have several masks each, there is a copy for each candidate, one below the other, or side by side
    for a picture that is higher than wide: the first candidate of every prompt, then the second, and so on.

    Args:
        image_rgb: (H, W, 3) uint8, the image the masks belong to.
        masks: of the prompts, as many for each.
        points: (N, 3) x, y in pixels of the image, and 1 (green: on the object) or 0 (red: beside it).
        boxes: (B, 4) xyxy, pixels; the b-th box belongs to prompt b.

    Returns:
        (H, W, 3) uint8 RGB, or (C × H, W, 3) or (H, C × W, 3) for C candidates.

    Raises:
        ShapeError: the image is not (H, W, 3) uint8, or not of the masks' size; or boxes for some prompts only.
    """
    _check(image_rgb, masks.image_hw)
    dots = np.asarray(points, np.float64).reshape(-1, 3)
    corners = np.asarray(boxes, np.float64).reshape(-1, 4)
    prompts = int(masks.prompt.max(initial=0)) + 1
    if 0 < len(corners) < prompts:
        raise ShapeError(f"boxes: expected one for each of the {prompts} prompts or none, got {len(corners)}")
    colors = mask_colors(max(prompts, len(corners)))
    panels = [
        _panel(image_rgb, masks[of_candidate], dots, corners, colors, numbered=prompts > 1)
        for of_candidate in _by_candidate(masks.prompt)
    ]
    height, width = masks.image_hw
    return np.concatenate(panels, axis=1 if height > width else 0)


def draw_everything(image_rgb: npt.NDArray[np.uint8], masks: Masks) -> npt.NDArray[np.uint8]:
    """A copy of the picture with every mask in a colour of its own and outlined, the largest at the bottom.

    Args:
        image_rgb: (H, W, 3) uint8, the image the masks belong to.
        masks: any number.

    Returns:
        (H, W, 3) uint8 RGB.

    Raises:
        ShapeError: the image is not (H, W, 3) uint8, or not of the masks' size.
    """
    _check(image_rgb, masks.image_hw)
    scene = np.ascontiguousarray(image_rgb[..., ::-1])
    colors = [color[::-1] for color in mask_colors(len(masks))]
    _tint(scene, masks.mask, colors)
    _outline(scene, masks.mask, colors, thickness=max(1, _thickness(masks.image_hw) // 2))
    return np.ascontiguousarray(scene[..., ::-1])


def mask_colors(count: int) -> list[tuple[int, int, int]]:
    """`count` bright RGB colours that are told apart as well as so many can be; the first is blue."""
    import colorsys

    colors = []
    for i in range(count):
        # A second and third ring, paler and darker, for when the hues draw near to one another.
        saturation, value = ((0.88, 1.0), (0.5, 1.0), (0.9, 0.72))[i // 12 % 3]
        rgb = colorsys.hsv_to_rgb((210 + i * _HUE_STEP) % 360 / 360, saturation, value)
        colors.append((round(255 * rgb[0]), round(255 * rgb[1]), round(255 * rgb[2])))
    return colors


def _check(image_rgb: npt.NDArray[np.uint8], image_hw: tuple[int, int]) -> None:
    if image_rgb.shape != (*image_hw, 3) or image_rgb.dtype != np.uint8:
        raise ShapeError(f"image_rgb: expected {(*image_hw, 3)} uint8, got {image_rgb.shape} {image_rgb.dtype.name}")


def _thickness(image_hw: tuple[int, int]) -> int:
    import supervision as sv

    return int(sv.calculate_optimal_line_thickness(resolution_wh=image_hw[::-1]))


def _class_labels(detections: Detections, class_names: Sequence[str]) -> list[str]:
    return [
        f"{class_names[c] if c < len(class_names) else c} {confidence:.2f}"
        for c, confidence in zip(detections.class_id.tolist(), detections.confidence.tolist(), strict=True)
    ]


def _by_candidate(prompt: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Positions of every prompt's first mask, then of every prompt's second, and so on; one empty list for none."""
    seen = np.array([np.count_nonzero(prompt[:i] == number) for i, number in enumerate(prompt)], np.int64)
    return [np.flatnonzero(seen == candidate) for candidate in range(int(seen.max(initial=0)) + 1)]


def _panel(
    image_rgb: npt.NDArray[np.uint8],
    masks: Masks,
    dots: npt.NDArray[np.float64],
    corners: npt.NDArray[np.float64],
    colors: Sequence[tuple[int, int, int]],
    *,
    numbered: bool,
) -> npt.NDArray[np.uint8]:
    """One mask a prompt, the prompts, and the masks' scores, after the prompt's number where there are several."""
    import cv2
    import supervision as sv

    scene = np.ascontiguousarray(image_rgb[..., ::-1])
    thickness = _thickness(masks.image_hw)
    bgr = [color[::-1] for color in colors]
    of_mask = [bgr[number] for number in masks.prompt.tolist()]
    _tint(scene, masks.mask, of_mask)
    _outline(scene, masks.mask, of_mask, thickness)
    for color, box in zip(bgr, corners, strict=False):
        left, top, right, bottom = np.rint(box).astype(int).tolist()
        cv2.rectangle(scene, (left, top), (right, bottom), color, thickness)
    empty = masks.mask.area() == 0
    texts = [
        (f"{number}: " if numbered else "") + f"{score:.2f}" + (" empty" if nothing else "")
        for number, score, nothing in zip(masks.prompt.tolist(), masks.score.tolist(), empty.tolist(), strict=True)
    ]
    if len(corners):
        anchors = corners[masks.prompt]
    else:  # an empty mask is labelled at the first point
        nowhere = np.tile(dots[:1, :2], 2) if len(dots) else 0
        anchors = np.where(empty[:, None], nowhere, masks.xyxy)
    palette = sv.ColorPalette([sv.Color(*color) for color in colors])
    scene = _label(scene, sv.Detections(xyxy=anchors.astype(np.float32), class_id=masks.prompt.copy()), texts, palette)
    radius = 3 * thickness
    for x, y, label in dots.tolist():
        center = (round(x), round(y))
        cv2.circle(scene, center, radius + max(1, thickness // 2), _WHITE, cv2.FILLED, cv2.LINE_AA)
        color = _POSITIVE if label else _NEGATIVE
        cv2.circle(scene, center, radius, color[::-1], cv2.FILLED, cv2.LINE_AA)
    return np.ascontiguousarray(scene[..., ::-1])


def _label(
    scene_bgr: npt.NDArray[np.uint8], boxes: sv.Detections, texts: list[str], palette: sv.ColorPalette
) -> npt.NDArray[np.uint8]:
    """A label on each box, inside the picture; colours by class id."""
    import supervision as sv

    image_hw = scene_bgr.shape[:2]
    text_scale = sv.calculate_optimal_text_scale(resolution_wh=image_hw[::-1])
    annotator = sv.LabelAnnotator(
        color=palette,
        text_scale=text_scale,
        text_thickness=max(1, _thickness(image_hw) // 2),
        text_padding=max(2, round(10 * text_scale)),
        # Keeps labels inside the picture and apart. Quadratic (0.5 s for 300), and in a crowd nothing helps.
        smart_position=len(texts) <= 300,
    )
    labelled: npt.NDArray[np.uint8] = annotator.annotate(scene_bgr, boxes, labels=texts)
    return labelled


def _tint(scene_bgr: npt.NDArray[np.uint8], mask: InstanceMasks, colors_bgr: Sequence[tuple[int, int, int]]) -> None:
    """Tints each mask's pixels in place: the largest mask first, one dense plane at a time."""
    import cv2

    tint = scene_bgr.copy()
    extents = mask.xywh().tolist()
    for i in np.argsort(-mask.area(), kind="stable").tolist():
        left, top, width, height = extents[i]
        inside = np.s_[top : top + height, left : left + width]
        tint[inside][mask[[i]].dense()[0][inside]] = colors_bgr[i]
    cv2.addWeighted(scene_bgr, 1 - _MASK_OPACITY, tint, _MASK_OPACITY, 0, dst=scene_bgr)


def _outline(
    scene_bgr: npt.NDArray[np.uint8],
    mask: InstanceMasks,
    colors_bgr: Sequence[tuple[int, int, int]],
    thickness: int,
) -> None:
    """Draws the outer contours of each mask in place, in the order of `_tint`."""
    import cv2

    polygons = mask.polygons()
    for i in np.argsort(-mask.area(), kind="stable").tolist():
        cv2.polylines(scene_bgr, polygons[i], isClosed=True, color=colors_bgr[i], thickness=thickness)
