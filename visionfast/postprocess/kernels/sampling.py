"""Where the masks' kernels sample: boxes in whole pixels, and image pixels → prototype pixels and weights.

`postprocess.prototypes` defines the two steps: the plane is enlarged by the smallest whole factor that puts the
padding's edges between two pixels, cut there, and the rest is enlarged to the image. Positions are whole numbers
(twice the pixel, over twice the length), so they have no rounding of their own, however long the image.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, for Triton's own way to write what is known when a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["boxes", "column_taps", "cuts", "prototype", "sample"]


@triton.jit
def cuts(placement, image, STRIDE: tl.constexpr):
    """The factor of the first enlargement, and for rows and columns: first enlarged pixel, how many, image pixels."""
    row = placement + image * 8
    left, top = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
    width, height = tl.load(row + 4).to(tl.int32), tl.load(row + 5).to(tl.int32)
    right, bottom = left + tl.load(row + 6).to(tl.int32), top + tl.load(row + 7).to(tl.int32)
    factor = tl.full((), STRIDE, tl.int32)
    for part in tl.static_range(2, STRIDE + 1):  # edges on multiples of it leave a smaller factor
        if STRIDE % part == 0:
            misses = left % part + top % part + right % part + bottom % part
            factor = tl.where(misses == 0, STRIDE // part, factor)
    first_y, first_x = top * factor // STRIDE, left * factor // STRIDE
    count_y, count_x = bottom * factor // STRIDE - first_y, right * factor // STRIDE - first_x
    # A slot without an image has no tiles; 1 keeps its divisions from being by 0.
    return factor, first_y, count_y, tl.maximum(height, 1), first_x, count_x, tl.maximum(width, 1)


@triton.jit
def sample(pixel, length, count):
    """Image pixel → the enlarged pixel before it, -1 for none, and how far beyond that it is, in 1 / (2 × length)."""
    numerator = (2 * pixel + 1) * count + length  # of the position plus 1, so never negative
    return numerator // (2 * length) - 1, numerator % (2 * length)


@triton.jit
def prototype(enlarged, factor):
    """Enlarged pixel → the prototype pixel before it, and the weight of the one after that."""
    numerator = tl.maximum(2 * enlarged + 1 - factor, 0)
    return numerator // (2 * factor), (numerator % (2 * factor)) / (2 * factor)


@triton.jit
def column_taps(x, factor, first_x, count_x, width):
    """Image columns → for each the first of three prototype columns, and their weights."""
    before, rest = sample(x, width, count_x)
    beyond = tl.where(before < 0, 0.0, rest / (2 * width))
    near = tl.maximum(before, 0)
    far = tl.minimum(before + 1, count_x - 1)
    near_tap, near_weight = prototype(first_x + near, factor)
    far_tap, far_weight = prototype(first_x + far, factor)
    same = far_tap == near_tap  # else it is the next
    second = tl.where(same, far_weight, 1 - far_weight)
    weight_0 = (1 - beyond) * (1 - near_weight) + beyond * tl.where(same, 1 - far_weight, 0.0)
    weight_1 = (1 - beyond) * near_weight + beyond * second
    weight_2 = beyond * tl.where(same, 0.0, far_weight)
    return near_tap, weight_0, weight_1, weight_2


@triton.jit
def boxes(found, placement, image, MAX_DET: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The image's objects' boxes, whole pixels `left <= x < right`, `top <= y < bottom`; none beyond the count."""
    index = tl.arange(0, BLOCK)
    row = found + tl.cast(image, tl.int64) * ((1 + MAX_DET) * 8)
    there = index < tl.minimum(tl.load(row), MAX_DET)
    corner = row + (1 + index) * 8
    x1 = tl.load(corner, there, 0).to(tl.float32, bitcast=True)
    y1 = tl.load(corner + 1, there, 0).to(tl.float32, bitcast=True)
    x2 = tl.load(corner + 2, there, 0).to(tl.float32, bitcast=True)
    y2 = tl.load(corner + 3, there, 0).to(tl.float32, bitcast=True)
    width, height = tl.load(placement + image * 8 + 4), tl.load(placement + image * 8 + 5)
    sound = (x1 < x2) & (y1 < y2)  # not so where one is NaN
    left = tl.minimum(tl.maximum(tl.ceil(tl.where(sound, x1, 0.0)), 0.0), width).to(tl.int32)
    top = tl.minimum(tl.maximum(tl.ceil(tl.where(sound, y1, 0.0)), 0.0), height).to(tl.int32)
    right = tl.minimum(tl.maximum(tl.ceil(tl.where(sound, x2, 0.0)), 0.0), width).to(tl.int32)
    bottom = tl.minimum(tl.maximum(tl.ceil(tl.where(sound, y2, 0.0)), 0.0), height).to(tl.int32)
    words_high = (bottom - top + 31) // 32
    words = (right - left).to(tl.int64) * words_high
    tiles = ((right - left + TILE - 1) // TILE).to(tl.int64) * words_high
    return left, top, right, bottom, words, tiles
