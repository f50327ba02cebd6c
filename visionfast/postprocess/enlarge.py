"""Mask logits of a prompt decoder → the original image: bilinear, as the official predictors enlarge them.

SAM's (`Sam.postprocess_masks`, segment_anything 1.0) come to the network's input first, are cut to where the image
lies in it, and go from there to the image's own size; SAM 2's (`SAM2Transforms.postprocess_masks`, sam2 1.1) go there
at once. Each step is PyTorch's `interpolate(mode="bilinear", align_corners=False)`: its sampling positions are float32,
a fused multiply-add that is rounded once, and so are they here. The weights are PyTorch's to the bit, and what comes
out agrees within 5e-7 of the logits' scale (torch 2.14, CPU).

The steps are linear along each axis, so both together are a few taps for each row and each column of the image.

A logit that is NaN counts as -1e30, and none is further from 0 than that: what touches a NaN is outside, all sums are
finite, and a pixel never depends on logits that it has no weight of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.types import Letterbox, Resize

__all__ = ["Step", "Taps", "axis_steps", "axis_taps", "bounded", "enlarge_reference", "enlarge_taps"]

_FURTHEST = np.float32(1e30)


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """One axis' enlargement: pixel i is the sum over k of `weight[i, k] * logits[first[i] + k]`.

    Attributes:
        first: (n,) int32, ascending; `first + T` is never beyond the plane.
        weight: (n, T) float32, 0..1; T is 2 or 3.
    """

    first: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]


def enlarge_reference(logits: npt.NDArray[np.float32], placed: Letterbox, resize: Resize) -> npt.NDArray[np.float32]:
    """The definition: (K, h, w) float32 logits → (K, H, W) float32 over the whole original image.

    Sums are in double precision, rounded once.

    Args:
        logits: K planes over the network's input, 256 × 256 in the published models, h and w at least 3.
        placed: where the image lies in the network's input.
        resize: how it came there. Whether a square image came by `longest-side` or by `stretch` cannot be told from
            `placed`, and its masks differ: only the former pass through the input's size.

    Raises:
        ShapeError: the planes are larger than the input, or smaller than 3 × 3.
    """
    enlarged = bounded(logits).astype(np.float64)
    for axis in (0, 1):
        enlarged = np.moveaxis(enlarged, axis + 1, 0)
        for step in axis_steps(len(enlarged), placed, resize, axis):
            share = step.share.astype(np.float64)[:, :, None, None]
            enlarged = enlarged[step.below] * share[:, 0] + enlarged[step.above] * share[:, 1]
        enlarged = np.moveaxis(enlarged, 0, axis + 1)
    return enlarged.astype(np.float32)


def enlarge_taps(plane_hw: tuple[int, int], placed: Letterbox, resize: Resize) -> tuple[Taps, Taps]:
    """The whole enlargement of (h, w) logits as taps: of the image's H rows, and of its W columns.

    2 taps where one step leads to the image, 3 where two do. Weights are those of the steps multiplied in double
    precision and rounded once: what they give is within 2e-7 of the logits' scale of the definition.

    Takes and raises what `enlarge_reference` does.
    """
    rows, columns = (axis_taps(plane_hw[axis], axis_steps(plane_hw[axis], placed, resize, axis)) for axis in (0, 1))
    return rows, columns


# ---- along one axis --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One bilinear enlargement: pixel i lies between source pixels `below[i]` and `above[i]`.

    Attributes:
        position: (n,) float32, of each pixel among the source's, 0 to their number - 1, ascending.
        below, above: (n,) int64; both are 0 where the source is one pixel.
        share: (n, 2) float32, the two's weights.
    """

    position: npt.NDArray[np.float32]
    below: npt.NDArray[np.int64]
    above: npt.NDArray[np.int64]
    share: npt.NDArray[np.float32]


def _step(source: int, length: int, cut: slice = slice(None)) -> Step:
    """From `source` pixels to `length`, of which those of `cut` are kept."""
    scale = np.float32(source) / np.float32(length)
    # A float32 times a float32 is exact in float64: rounded behind the subtraction, as a fused multiply-add is.
    position = (np.float64(scale) * (np.arange(length)[cut] + 0.5) - 0.5).astype(np.float32)
    position = np.clip(position, np.float32(0), np.float32(source - 1))
    below = np.minimum(position.astype(np.int64), max(source - 2, 0))
    share = position - below.astype(np.float32)
    return Step(position, below, np.minimum(below + 1, source - 1), np.stack([np.float32(1) - share, share], axis=1))


def axis_steps(logits: int, placed: Letterbox, resize: Resize, axis: int) -> list[Step]:
    """The one or two steps from so many logits along an axis (0: rows, 1: columns) to the image."""
    size, image = placed.size_hw[axis], placed.image_hw[axis]
    if not 3 <= logits <= size:
        raise ShapeError(f"logits: expected 3 to {size} along each axis, as many as the input's pixels, got {logits}")
    if resize == "stretch":
        return [_step(logits, image)]
    begin, length = (placed.top, placed.left)[axis], placed.resized_hw[axis]
    return [_step(logits, size, slice(begin, begin + length)), _step(length, image)]


def axis_taps(logits: int, steps: list[Step]) -> Taps:
    """The steps of `axis_steps` in one."""
    if len(steps) == 1:
        return Taps(steps[0].below.astype(np.int32), steps[0].share)
    inner, outer = steps
    first = np.minimum(inner.below[outer.below], logits - 3)
    weight, pixel = np.zeros((len(first), 3)), np.arange(len(first))
    for knot, share in ((outer.below, outer.share[:, 0]), (outer.above, outer.share[:, 1])):
        for k in (0, 1):
            weight[pixel, inner.below[knot] + k - first] += share.astype(np.float64) * inner.share[knot, k]
    return Taps(first.astype(np.int32), weight.astype(np.float32))


def bounded(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The logits with none that is not finite, by the rule above: float32 of any shape."""
    finite: npt.NDArray[np.float32] = np.fmin(np.fmax(logits, -_FURTHEST), _FURTHEST)  # the number, where one is NaN
    return finite
