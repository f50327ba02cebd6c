"""Clicks and boxes on an image → the points and labels that SAM's decoder takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import OptionError
from visionfast.types import Letterbox, PromptSpec, PromptTensors

__all__ = ["no_boxes", "parse_box", "parse_point", "prompt_numbers", "prompt_tensors"]

_PADDING = -1.0
_CORNERS = (2.0, 3.0)  # top left, bottom right
_POINTS_FORM = "[x, y, label] points as (N, 3), or (P, N, 3) for P prompts, label 1 on the object and 0 beside it"
_BOXES_FORM = "[x1, y1, x2, y2] boxes as (4,), or (P, 4) for P prompts"
_MASK_FORM = "mask logits (P, 256, 256)"
_MASK_STRIDE = 4  # pixels of the network's input in one of a mask's


def prompt_tensors(
    points: Any,
    boxes: Any,
    *,
    mask_input: Any = None,
    placed: Letterbox,
    spec: PromptSpec,
    most_points: int,
) -> PromptTensors:
    """Prompts in original pixels → the decoder's inputs, in the order and with the padding of `spec`.

    The numbers are those that the official predictors give their prompt encoders: an original coordinate times
    resized side / original side in double precision, rounded once to float32 (SAM: `ResizeLongestSide.apply_coords`).
    SAM 2's rounds the original coordinate to float32 first: for one that float32 does not hold exactly, such as 0.1,
    it is one unit in the last place away at most, 6e-5 pixels of 1024; for all others the numbers are equal.

    Args:
        points: [x, y, label], original pixels, label 1 on the object and 0 beside it: (N, 3) for one prompt, or (3,)
            where it is one point; (P, N, 3) for P prompts, as an array or nested sequences; or `None`. Points beside
            the object alone are allowed.
        boxes: x1, y1, x2, y2, original pixels: (4,) for one prompt, (P, 4) for P; or `None`. With points, each prompt
            has both.
        mask_input: mask logits of an earlier answer, with points or boxes that correct it: (256, 256) for one prompt,
            (P, 256, 256) or (P, 1, 256, 256). Not alone: the decoder's engine takes one point at least, and the
            official predictors do not pad where there is only a mask.
        placed: where the image lies in the network's input.
        spec: of the model.
        most_points: that the engine takes for a prompt, box corners and padding among them.

    Raises:
        OptionError: there is no prompt, or one that does not fit the image or the engine; the message says which one,
            counted from 0, and what it should be.
    """
    if points is None and boxes is None:
        if mask_input is not None:
            raise OptionError("mask_input: expected points or boxes with it, got it alone; say what it gets wrong")
        raise OptionError("prompts: expected points or boxes, got neither; give at least one point or box")
    clicks = None if points is None else _clicks(points, placed.image_hw)  # (P, N, 2), (P, N)
    corners = None if boxes is None else _corners(boxes, placed.image_hw)  # (P, 2, 2), (P, 2)
    if clicks and corners and len(clicks[0]) != len(corners[0]):
        n_points, n_boxes = len(clicks[0]), len(corners[0])
        raise OptionError(
            f"prompts: expected as many prompts of points as boxes, got {n_points} and {n_boxes}; "
            f"give points as ({n_boxes}, N, 3), those of each box"
        )
    parts = [part for part in ((corners, clicks) if spec.box_first else (clicks, corners)) if part]
    xy, labels = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    if spec.pad_with_box or corners is None:
        xy = np.pad(xy, [(0, 0), (0, 1), (0, 0)])  # at (0, 0), which the placement leaves there
        labels = np.pad(labels, [(0, 0), (0, 1)], constant_values=_PADDING)
    if clicks and labels.shape[1] > most_points:
        got = clicks[1].shape[1]
        beside = f"{' with a box' if corners else ''}, which this engine was built for"
        raise OptionError(f"points: expected at most {most_points - labels.shape[1] + got} a prompt{beside}, got {got}")
    (image_h, image_w), (new_h, new_w) = placed.image_hw, placed.resized_hw
    return PromptTensors(
        points=(xy * (new_w / image_w, new_h / image_h)).astype(np.float32),
        labels=labels.astype(np.float32),
        mask_input=None if mask_input is None else _masks(mask_input, len(labels), placed.size_hw),
    )


def prompt_numbers(
    points: Any, boxes: Any, mask_input: Any = None
) -> tuple[npt.NDArray[np.float64] | None, npt.NDArray[np.float64] | None, npt.NDArray[np.float64] | None]:
    """Points, boxes and mask logits as numbers, of whatever shape they are: what can be said without the image.

    Boxes of (0, 4), a detector's that found nothing, may stand alone.

    Raises:
        OptionError: something else than numbers, or ragged, or empty; as `prompt_tensors` words it.
    """
    if no_boxes(points, boxes):
        return None, np.zeros((0, 4)), None
    return (
        None if points is None else _numbers(points, "points", _POINTS_FORM),
        None if boxes is None else _numbers(boxes, "boxes", _BOXES_FORM),
        None if mask_input is None else _numbers(mask_input, "mask_input", _MASK_FORM),
    )


def no_boxes(points: Any, boxes: Any) -> bool:
    """Whether boxes of (0, 4) are all that is asked, as of a detector that found nothing: the answer is no mask."""
    try:
        return points is None and boxes is not None and np.shape(boxes) == (0, 4)
    except ValueError:  # ragged
        return False


def _clicks(points: Any, image_hw: tuple[int, int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(P, N, 2) original pixels and (P, N) labels, checked."""
    numbers = _numbers(points, "points", _POINTS_FORM)
    if numbers.ndim not in (1, 2, 3) or numbers.shape[-1] != 3:
        raise OptionError(f"points: expected {_POINTS_FORM}, got {numbers.shape}")
    numbers = np.atleast_2d(numbers)
    numbers = numbers.reshape(-1, *numbers.shape[-2:])
    xy, labels = numbers[:, :, :2], numbers[:, :, 2]
    h, w = image_hw
    outside = ~((xy >= 0) & (xy < (w, h))).all(axis=2)  # NaN is nowhere
    for prompt, point in np.argwhere(outside)[:1]:
        x, y = xy[prompt, point]
        swapped = " with x first" if 0 <= y < w and 0 <= x < h else ""
        raise OptionError(
            f"points: prompt {prompt}, point {point}: expected 0 <= x < {w} and 0 <= y < {h}, got ({x}, {y}); "
            f"give pixels of the original image{swapped}"
        )
    for prompt, point in np.argwhere((labels != 0) & (labels != 1))[:1]:
        raise OptionError(
            f"points: prompt {prompt}, point {point}: expected label 1 (on the object) or 0 (beside it), "
            f"got {labels[prompt, point]}"
        )
    return xy, labels


def _corners(boxes: Any, image_hw: tuple[int, int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(P, 2, 2) corners in original pixels and (P, 2) their labels, checked."""
    xyxy = _numbers(boxes, "boxes", _BOXES_FORM)
    if xyxy.ndim not in (1, 2) or xyxy.shape[-1] != 4:
        raise OptionError(f"boxes: expected {_BOXES_FORM}, got {xyxy.shape}")
    xyxy = xyxy.reshape(-1, 4)
    h, w = image_hw
    x1, y1, x2, y2 = xyxy.T
    inside = (x1 >= 0) & (x1 < x2) & (x2 <= w) & (y1 >= 0) & (y1 < y2) & (y2 <= h)  # NaN is nowhere
    for prompt in np.flatnonzero(~inside)[:1]:
        got = ", ".join(str(side) for side in xyxy[prompt])
        raise OptionError(
            f"boxes: prompt {prompt}: expected 0 <= x1 < x2 <= {w} and 0 <= y1 < y2 <= {h}, got ({got}); "
            "give corners in pixels of the original image"
        )
    return xyxy.reshape(-1, 2, 2), np.tile(_CORNERS, (len(xyxy), 1))


def _masks(mask_input: Any, prompts: int, size_hw: tuple[int, int]) -> npt.NDArray[np.float32]:
    """(P, 1, h / 4, w / 4) float32 logits, checked."""
    h, w = size_hw[0] // _MASK_STRIDE, size_hw[1] // _MASK_STRIDE
    form = f"mask logits ({prompts}, {h}, {w})"
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite, and refused
        logits = _numbers(mask_input, "mask_input", form).astype(np.float32)
    shapes = [(prompts, h, w), (prompts, 1, h, w), *([(h, w)] if prompts == 1 else [])]
    if logits.shape not in shapes:
        raise OptionError(f"mask_input: expected {form}, one for each prompt, got {logits.shape}")
    if not np.isfinite(logits).all():
        raise OptionError("mask_input: expected finite logits, got NaN or infinity; give those of an earlier answer")
    return logits.reshape(prompts, 1, h, w)


def _numbers(value: Any, name: str, form: str) -> npt.NDArray[np.float64]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):  # ragged; or another library's array that does not convert
        raise OptionError(
            f"{name}: expected {form}, got what is no such array; ask prompts of different lengths one after the other"
        ) from None
    if array.size == 0:
        raise OptionError(f"{name}: expected {form}, got none at all {array.shape}; leave out what there is none of")
    if array.dtype.kind not in "iuf":
        raise OptionError(f"{name}: expected {form}, got {array.dtype.name} values; give numbers")
    return array.astype(np.float64)


# ---- as they are typed ------------------------------------------------------------------------------------


def parse_point(text: str) -> tuple[float, float, int]:
    """`320,240` or `320,240:1` (on the object), `320,240:0` (beside it) → x, y, label.

    Raises:
        OptionError: it is something else.
    """
    place, colon, label = text.partition(":")
    numbers = _typed_numbers(place)
    if len(numbers) != 2 or label.strip() not in (("0", "1") if colon else ("",)):
        raise OptionError(
            f"point {text!r}: expected X,Y or X,Y:LABEL with label 1 (on the object) or 0 (beside it), "
            "for example 320,240:0"
        )
    _check_pixels("point", text, numbers)
    return numbers[0], numbers[1], int(label or 1)


def parse_box(text: str) -> tuple[float, float, float, float]:
    """`10,20,300,400` → x1, y1, x2, y2.

    Raises:
        OptionError: it is something else.
    """
    numbers = _typed_numbers(text)
    if len(numbers) != 4:
        raise OptionError(f"box {text!r}: expected X1,Y1,X2,Y2, for example 10,20,300,400")
    _check_pixels("box", text, numbers)
    x1, y1, x2, y2 = numbers
    return x1, y1, x2, y2


def _check_pixels(what: str, text: str, numbers: list[float]) -> None:
    """Raises `OptionError` for what nobody means in pixels, and everybody who thinks in parts of the picture."""
    if max(numbers) <= 1 and any(number % 1 for number in numbers):
        raise OptionError(f"{what} {text!r}: expected pixels of the original image, got parts of it")


def _typed_numbers(text: str) -> list[float]:
    """Numbers with commas between them; none where one of them is no finite number."""
    if not text.isascii() or "_" in text:  # which Python's float would take
        return []
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []
