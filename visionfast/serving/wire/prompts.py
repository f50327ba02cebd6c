"""What is asked of an image, clicks and boxes or everything, as the options of its request and back.

    {"points": [[x, y, label], …], "boxes": [[x1, y1, x2, y2], …], "multimask": true, "logits": true}
    {"everything": {"points_per_side": 16}}

As `PromptSegmenter.segment` and `.everything` take them; `"boxes": []` is a detector's that found nothing. The logits
of a mask to go on from are a tensor of their own, `mask_input`, and `mask_input_shape` says which shape they have.
`image_key` stands for the image, which is not sent then: its `visionfast.embedding.image_key`, under which the server
may have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import OptionError
from visionfast.preprocess.prompts import prompt_numbers

__all__ = ["NO_MASK", "pack_prompts", "unpack_mask_input", "unpack_prompts"]

NO_MASK = np.zeros((1, 1), np.float32)
"""`mask_input` of a request without one."""


def pack_prompts(
    points: Any, boxes: Any, mask_input: Any, *, multimask: bool | None, logits: bool
) -> tuple[dict[str, Any], npt.NDArray[np.float32]]:
    """The options of a request, for `pack_options`, and its `mask_input` (1, n).

    What can be checked without the image is checked here, so that it has the text that it has in process.

    Raises:
        OptionError: something else than numbers, or ragged, or empty.
    """
    points, boxes, mask = prompt_numbers(points, boxes, mask_input)  # float64, or None
    options: dict[str, Any] = {
        "points": None if points is None else points.tolist(),
        "boxes": None if boxes is None else boxes.tolist(),
        "multimask": multimask,
        "logits": logits or None,
    }
    if mask is None:
        return options, NO_MASK
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite, and refused by the model
        flat = mask.astype(np.float32).reshape(1, -1)
    return options | {"mask_input_shape": list(mask.shape)}, flat


def unpack_prompts(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request → `points`, `boxes`, `multimask` and `logits` of `PromptSegmenter.segment`, which checks
    them."""
    boxes = options.get("boxes")
    return {
        "points": options.get("points"),
        "boxes": np.zeros((0, 4)) if boxes == [] else boxes,
        "multimask": options["multimask"],
        "logits": options.get("logits", False),
    }


def unpack_mask_input(options: Mapping[str, Any], row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
    """One image's row of `mask_input` → `mask_input` of `PromptSegmenter.segment`.

    Raises:
        OptionError: the shape that the options say is none, or not that of so many numbers.
    """
    if (shape := options.get("mask_input_shape")) is None:
        return None
    whole = isinstance(shape, list) and all(type(size) is int and 0 < size < 2**31 for size in shape)
    if not whole or math.prod(shape) != row.size:
        raise OptionError(f"mask_input_shape: expected the shape of {row.size} numbers, got {shape!r}")
    return row.reshape(shape)
