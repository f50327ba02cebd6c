"""Prototypes and coefficients → instance masks at original resolution, as in YOLACT (Bolya et al. 2019).

A mask's logits are a weighted sum of M prototype planes. The plane is enlarged to the original image and
thresholded at 0 inside the object's box. Geometry as in ultralytics' `process_mask_native` (8.4,
`retina_masks=True`): one prototype pixel covers `stride` input pixels, so the letterbox's padding may end
inside one. Then the plane is first enlarged by the smallest whole factor that puts the padding's edge between
two pixels (1, 2 or 4 at stride 4), cut there, and the rest enlarged to the image; no mask is shifted by a
rounded padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.postprocess.masks import InstanceMasks, counts_from_runs
from visionfast.products import product
from visionfast.types import FloatArray, Letterbox

__all__ = ["decode_masks", "mask_logits_reference", "masks_reference"]

_STRIP_PIXELS = 1 << 18  # of a box, decoded at once: 1 MiB of float32, which stays in the L2 cache
_BLOCK = 16  # image pixels of one product: they need some five prototype pixels
_TOGETHER, _LOGITS = 16, 1 << 19  # objects whose logits are one product, and how many logits those are at most


def mask_logits_reference(
    prototypes: FloatArray, coefficients: npt.NDArray[np.float32], letterbox: Letterbox
) -> npt.NDArray[np.float64]:
    """The definition: (N, H, W) float64 logits over the whole image, before the box cuts them.

    Takes and raises what `decode_masks` does.
    """
    plane_hw = (prototypes.shape[1], prototypes.shape[2])
    factor = _enlargement(letterbox, plane_hw)
    logits = np.tensordot(coefficients.astype(np.float64), prototypes.astype(np.float64), axes=1)  # (N, mh, mw)
    for axis, begin in ((1, letterbox.top), (2, letterbox.left)):
        stride = letterbox.size_hw[axis - 1] // plane_hw[axis - 1]
        end = begin + letterbox.resized_hw[axis - 1]
        logits = _resize(np.moveaxis(logits, axis, 0), plane_hw[axis - 1] * factor)
        logits = logits[begin * factor // stride : end * factor // stride]  # without the padding
        logits = np.moveaxis(_resize(logits, letterbox.image_hw[axis - 1]), 0, axis)
    return logits


def masks_reference(
    prototypes: FloatArray,
    coefficients: npt.NDArray[np.float32],
    xyxy: npt.NDArray[np.float32],
    letterbox: Letterbox,
) -> npt.NDArray[np.bool_]:
    """The definition of `decode_masks`: (N, H, W) bool, pixels x1 ≤ x < x2, y1 ≤ y < y2 with logit > 0."""
    masks = mask_logits_reference(prototypes, coefficients, letterbox) > 0
    y, x = np.arange(letterbox.image_hw[0]), np.arange(letterbox.image_hw[1])
    for mask, (x1, y1, x2, y2) in zip(masks, xyxy, strict=True):
        mask &= ((y >= y1) & (y < y2))[:, None] & ((x >= x1) & (x < x2))
    return masks


def decode_masks(
    prototypes: FloatArray,
    coefficients: npt.NDArray[np.float32],
    xyxy: npt.NDArray[np.float32],
    letterbox: Letterbox,
) -> InstanceMasks:
    """The masks of N objects, straight to run lengths: only inside each box, in strips of columns.

    Enlarging is linear along each axis, so it is two products with narrow band matrices: rows first, at the
    prototypes' width, then strip by strip the columns. What a strip needs is its own few prototype columns.
    Beside the prototypes and the two matrices (4 bytes × (H × mh + W × mw)) the peak is a few MiB, however
    many objects there are and however large their boxes. Pixels whose logit is within rounding of 0 may fall
    on either side. Everything is computed on the calling thread.

    Args:
        prototypes: (M, mh, mw) float32 or float16; (h, w) of the input is a whole multiple of (mh, mw).
        coefficients: (N, M) float32.
        xyxy: (N, 4) float32, finite, original pixels.
        letterbox: where the image lies in the input.

    Returns:
        N masks, some of them perhaps empty.

    Raises:
        ShapeError: the shapes do not go together.
    """
    if prototypes.ndim != 3 or not prototypes.size or coefficients.shape != (len(xyxy), prototypes.shape[0]):
        raise ShapeError(
            f"coefficients, prototypes: expected (N, M) and (M, mh, mw) for {len(xyxy)} boxes, M, mh and mw above 0, "
            f"got {coefficients.shape} and {prototypes.shape}"
        )
    _, plane_h, plane_w = prototypes.shape
    rows, columns = _resampling(letterbox, (plane_h, plane_w))
    planes = np.ascontiguousarray(prototypes, np.float32).reshape(len(prototypes), -1)  # (M, mh · mw)
    height, width = letterbox.image_hw
    nothing = np.zeros(0, np.int64)
    counts = [counts_from_runs(nothing, nothing, (height, width))] * len(xyxy)  # of an empty box
    boxes = {}
    for number, (x1, y1, x2, y2) in enumerate(xyxy.tolist()):
        box = max(0, math.ceil(x1)), max(0, math.ceil(y1)), min(width, math.ceil(x2)), min(height, math.ceil(y2))
        if box[0] < box[2] and box[1] < box[3]:
            boxes[number] = box
    spans = {number: rows.span(top, bottom) for number, (_, top, _, bottom) in boxes.items()}
    for number, logits in _logits(coefficients, planes, spans, plane_w):
        left, top, right, bottom = boxes[number]
        begin, end = columns.span(left, right)
        wide = rows.enlarged(logits[:, begin:end], top, bottom)
        tall = np.ascontiguousarray(wide.T)  # (prototype columns that the box needs, bottom - top)
        step = max(1, _STRIP_PIXELS // (bottom - top))
        runs = []
        for x in range(left, right, step):
            end_x = min(x + step, right)
            first, last = columns.span(x, end_x)
            strip = columns.enlarged(tall[first - begin : last - begin], x, end_x)
            runs.append(_strip_runs(strip, x, top, height))
        start, end_at = np.concatenate(runs, axis=1)
        counts[number] = counts_from_runs(start, end_at, (height, width))
    return InstanceMasks(tuple(counts), (height, width))


def _logits(
    coefficients: npt.NDArray[np.float32],
    planes: npt.NDArray[np.float32],
    spans: Mapping[int, tuple[int, int]],
    plane_w: int,
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Each object with its logits in the rows that it needs, some objects in one product.

    Args:
        coefficients: (N, M).
        planes: (M, mh · mw).
        spans: object → first and last row, exclusive, of its box.
        plane_w: mw.

    Yields:
        An object's number, and (rows, mw); in the order of the rows, so that those of one product need nearly the same.
    """
    waiting = sorted(spans, key=spans.__getitem__)
    while waiting:
        first, last = spans[waiting[0]]
        together = 0
        for number in waiting[:_TOGETHER]:
            wider = max(last, spans[number][1])
            if together and (together + 1) * (wider - first) * plane_w > _LOGITS:
                break
            last, together = wider, together + 1
        some, waiting = waiting[:together], waiting[together:]
        weights = np.zeros((max(2, together), coefficients.shape[1]), np.float32)
        weights[:together] = coefficients[some]  # at least two rows: of one, it would be a product with a vector
        logits = np.empty((len(weights), (last - first) * plane_w), np.float32)
        with np.errstate(all="ignore"):  # NaN and infinite coefficients: no logit of theirs is above 0
            product(weights, planes[:, first * plane_w : last * plane_w], logits)
        for row, number in zip(logits.reshape(len(weights), -1, plane_w), some, strict=False):
            begin, end = spans[number]
            yield number, row[begin - first : end - first]


@dataclass(frozen=True, slots=True, eq=False)
class _Resampling:
    """Bilinear enlargement of one axis as a band matrix.

    Attributes:
        matrix: (image pixels, prototype pixels) float32.
        first, last: for each image pixel the prototype pixels that it needs, `first <= p < last`; both
            ascend.
    """

    matrix: npt.NDArray[np.float32]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Prototype pixels that image pixels `begin <= i < end` need."""
        return int(self.first[begin]), int(self.last[end - 1])

    def enlarged(self, pixels: npt.NDArray[np.float32], begin: int, end: int) -> npt.NDArray[np.float32]:
        """The prototype pixels of `span(begin, end)`, (p, m) → image pixels `begin <= i < end`, (end - begin, m)."""
        result = np.empty((end - begin, pixels.shape[1]), np.float32)
        offset = int(self.first[begin])
        with np.errstate(all="ignore"):  # NaN and infinite logits are above nothing
            for i in range(begin, end, _BLOCK):
                j = min(i + _BLOCK, end)
                first, last = self.span(i, j)
                product(
                    self.matrix[i:j, first:last], pixels[first - offset : last - offset], result[i - begin : j - begin]
                )
        return result


@lru_cache(maxsize=4)  # a video or a camera has one geometry for all its pictures
def _resampling(letterbox: Letterbox, plane_hw: tuple[int, int]) -> tuple[_Resampling, _Resampling]:
    """The two axes' enlargements: rows, columns."""
    factor = _enlargement(letterbox, plane_hw)
    axes = []
    for axis, begin in ((0, letterbox.top), (1, letterbox.left)):
        stride = letterbox.size_hw[axis] // plane_hw[axis]
        end = begin + letterbox.resized_hw[axis]
        enlarged = _resize(np.eye(plane_hw[axis], dtype=np.float32), plane_hw[axis] * factor)
        matrix = _resize(enlarged[begin * factor // stride : end * factor // stride], letterbox.image_hw[axis])
        used = matrix != 0
        matrix.flags.writeable = False
        axes.append(_Resampling(matrix, used.argmax(axis=1), plane_hw[axis] - used[:, ::-1].argmax(axis=1)))
    return axes[0], axes[1]


def _strip_runs(strip: npt.NDArray[np.float32], left: int, top: int, image_height: int) -> npt.NDArray[np.int64]:
    """Runs of logits above 0 in a part of a box, whose first pixel is (`left`, `top`); (columns, rows).

    Returns:
        (2, R) int64: where each run starts and ends, as column-major pixel indices of the whole image.
    """
    width, height = strip.shape
    # One 0 before everything and one below each column: every run then has a start and an end of its own.
    flat = np.zeros(width * (height + 1) + 1, np.bool_)
    with np.errstate(all="ignore"):
        np.greater(strip, 0, out=flat[1:].reshape(width, height + 1)[:, :height])
    edges = np.flatnonzero(flat[1:] != flat[:-1])  # positions behind the first 0
    x, y = np.divmod(edges, height + 1)
    positions: npt.NDArray[np.int64] = (left + x) * image_height + (top + y)
    return positions.reshape(-1, 2).T


def _enlargement(letterbox: Letterbox, plane_hw: tuple[int, int]) -> int:
    """The smallest factor at which the plane's pixels meet all four edges of the un-padded image."""
    (height, width), (plane_h, plane_w) = letterbox.size_hw, plane_hw
    stride = height // plane_h if plane_h else 0
    if not stride or (plane_h * stride, plane_w * stride) != (height, width):
        raise ShapeError(f"prototypes: expected (mh, mw) that divide the input's {letterbox.size_hw}, got {plane_hw}")
    edges = (
        letterbox.top,
        letterbox.left,
        letterbox.top + letterbox.resized_hw[0],
        letterbox.left + letterbox.resized_hw[1],
    )
    return next(f for f in range(1, stride + 1) if stride % f == 0 and all(edge * f % stride == 0 for edge in edges))


def _resize(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Bilinear along axis 0: pixel centres at half integers, no antialias, border pixels repeated."""
    if len(array) == length:
        return array.copy()
    position = np.maximum((np.arange(length) + 0.5) * (len(array) / length) - 0.5, 0)
    below = np.minimum(position.astype(np.int64), len(array) - 1)
    above = np.minimum(below + 1, len(array) - 1)
    weight = (position - below).astype(array.dtype).reshape(-1, *[1] * (array.ndim - 1))
    resized: npt.NDArray[Any] = array[below] * (1 - weight) + array[above] * weight
    return resized
