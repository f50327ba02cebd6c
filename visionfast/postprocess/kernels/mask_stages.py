"""The four kernels that make packed masks out of prototypes and coefficients; `masks` launches them in this order.

    plan       each object's box in whole pixels, the prototype pixels it needs, where its words and tiles begin
    gather     the coefficients of the found anchors, out of `predictions`, so that `multiply` reads them in rows
    multiply   coefficients × prototypes = logits, a group of objects at a time, only where one of them needs it
    pack       tiles of columns × 32 rows: enlarge, threshold, and one word of 32 rows for each column

Enlarging is linear along each axis, and twice: by a whole factor, then to the image. Across, both steps together are
at most three prototype columns, with weights that a tile works out once. Down, a tile walks its 32 rows and keeps the
two enlarged rows that it is between, so that a pixel costs one multiply-add, one comparison and one bit; a new
enlarged row is read only when the walk comes to it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, N806, for Triton's own way to write what is known when a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

from visionfast.postprocess.kernels.sampling import boxes, column_taps, cuts, prototype, sample

__all__ = ["gather", "multiply", "pack", "plan"]


@triton.jit
def plan(
    found,  # (B, 1 + max_det, 8) i32
    placement,  # (B, 8) f32
    extents,  # (B, max_det + 1, 8) i32, written: left, top, right, bottom, and of the prototypes the same
    offsets,  # (B, max_det + 1) i64, written
    tiles,  # (B, max_det + 1) i64, written
    MAX_DET: tl.constexpr,
    BLOCK: tl.constexpr,
    PLANE_H: tl.constexpr,
    PLANE_W: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    image = tl.program_id(0)
    words_before, tiles_before = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for earlier in range(image):
        _, _, _, _, words, tile_count = boxes(found, placement, earlier, MAX_DET, BLOCK, TILE)
        words_before += words
        tiles_before += tile_count
    first_word, first_tile = tl.sum(words_before), tl.sum(tiles_before)

    left, top, right, bottom, words, tile_count = boxes(found, placement, image, MAX_DET, BLOCK, TILE)
    index = tl.arange(0, BLOCK)
    real = index < MAX_DET
    slot = image.to(tl.int64) * (MAX_DET + 1)
    tl.store(offsets + slot + index, first_word + tl.cumsum(words) - words, real)
    tl.store(tiles + slot + index, first_tile + tl.cumsum(tile_count) - tile_count, real)
    tl.store(offsets + slot + MAX_DET, first_word + tl.sum(words))
    tl.store(tiles + slot + MAX_DET, first_tile + tl.sum(tile_count))

    factor, first_y, count_y, height, first_x, count_x, width = cuts(placement, image, STRIDE)
    extent = extents + (slot + index) * 8
    tl.store(extent, left, real)
    tl.store(extent + 1, top, real)
    tl.store(extent + 2, right, real)
    tl.store(extent + 3, bottom, real)
    # Both pixels that an image pixel lies between have their taps within three prototype pixels.
    some = words > 0
    begin, _ = prototype(first_x + tl.maximum(sample(left, width, count_x)[0], 0), factor)
    end, _ = prototype(first_x + tl.maximum(sample(tl.maximum(right - 1, 0), width, count_x)[0], 0), factor)
    tl.store(extent + 4, tl.where(some, begin, 0), real)
    tl.store(extent + 6, tl.where(some, tl.minimum(end + 3, PLANE_W), 0), real)
    begin, _ = prototype(first_y + tl.maximum(sample(top, height, count_y)[0], 0), factor)
    end, _ = prototype(first_y + tl.maximum(sample(tl.maximum(bottom - 1, 0), height, count_y)[0], 0), factor)
    tl.store(extent + 5, tl.where(some, begin, 0), real)
    tl.store(extent + 7, tl.where(some, tl.minimum(end + 3, PLANE_H), 0), real)


@triton.jit
def gather(
    predictions,  # (B, 4 + C + M, A) f32
    found,  # (B, 1 + max_det, 8) i32
    coefficients,  # (B, M, max_det rounded up to whole groups) f32, written
    ROWS: tl.constexpr,
    ANCHORS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    M: tl.constexpr,
    M_BLOCK: tl.constexpr,
    MAX_DET: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
):
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = found + image * ((1 + MAX_DET) * 8)
    count = tl.minimum(tl.load(row), MAX_DET)
    if group * GROUP >= count:
        return
    index = group * GROUP + tl.arange(0, GROUP)
    there = index < count
    anchor = tl.load(row + (1 + index) * 8 + 6, there, 0)
    m = tl.arange(0, M_BLOCK)
    source = predictions + image * (ROWS * ANCHORS) + (FIRST_ROW + m[:, None]) * ANCHORS + anchor[None, :]
    value = tl.load(source, (m < M)[:, None] & there[None, :], 0.0)  # (M_BLOCK, GROUP)
    target = coefficients + image * (M * PADDED) + m[:, None] * PADDED + index[None, :]
    tl.store(target, value, (m < M)[:, None])


@triton.jit(do_not_specialize=["first_image"])
def multiply(
    prototypes,  # (B, M, mh, mw) f32 or f16
    coefficients,  # (B, M, PADDED) f32
    found,  # (B, 1 + max_det, 8) i32
    extents,  # (B, max_det + 1, 8) i32
    logits,  # (images of a pass, max_det, mh, mw) f32, written where an object needs it
    first_image: tl.int32,
    M: tl.constexpr,
    PLANE_H: tl.constexpr,
    PLANE_W: tl.constexpr,
    MAX_DET: tl.constexpr,
    PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    PIXELS: tl.constexpr,
):
    PLANE: tl.constexpr = PLANE_H * PLANE_W
    slot = tl.program_id(2).to(tl.int64)
    image = first_image + slot
    index = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    count = tl.minimum(tl.load(found + image * ((1 + MAX_DET) * 8)), MAX_DET)
    there = index < count
    extent = extents + (image * (MAX_DET + 1) + index) * 8
    left, top = tl.load(extent + 4, there, 0), tl.load(extent + 5, there, 0)
    right, bottom = tl.load(extent + 6, there, 0), tl.load(extent + 7, there, 0)
    first = tl.program_id(0) * PIXELS
    needed = (top <= (first + PIXELS - 1) // PLANE_W) & (first // PLANE_W < bottom)
    if tl.max(needed.to(tl.int32)) == 0:
        return

    pixel = first + tl.arange(0, PIXELS)
    real = pixel < PLANE
    plane = prototypes + image * (M * PLANE) + pixel
    column = coefficients + image * (M * PADDED) + index
    total = tl.zeros((GROUP, PIXELS), tl.float32)
    for m in tl.static_range(M):  # as a loop, each turn would take the products through shared memory
        total += tl.load(column + m * PADDED)[:, None] * tl.load(plane + m * PLANE, real, 0.0).to(tl.float32)[None, :]
    # Infinity times 0 is NaN: then not one pixel near it is above 0.
    total = tl.where(tl.abs(total) < float("inf"), total, float("nan"))
    x, y = pixel % PLANE_W, pixel // PLANE_W
    inside = (left[:, None] <= x[None, :]) & (x[None, :] < right[:, None])
    inside &= (top[:, None] <= y[None, :]) & (y[None, :] < bottom[:, None])
    tl.store(logits + (slot * MAX_DET + index)[:, None] * PLANE + pixel[None, :], total, inside & real[None, :])


@triton.jit
def _enlarged_row(plane, y, factor, tap_0, tap_1, tap_2, weight_0, weight_1, weight_2, PLANE_H, PLANE_W):
    """Row `y` of the enlarged logits, at the tile's image columns."""
    row, weight = prototype(y, factor)
    upper = plane + row * PLANE_W
    lower = plane + tl.minimum(row + 1, PLANE_H - 1) * PLANE_W
    above = weight_0 * tl.load(upper + tap_0) + weight_1 * tl.load(upper + tap_1) + weight_2 * tl.load(upper + tap_2)
    below = weight_0 * tl.load(lower + tap_0) + weight_1 * tl.load(lower + tap_1) + weight_2 * tl.load(lower + tap_2)
    return above + weight * (below - above)


@triton.jit(do_not_specialize=["first_image", "images", "first_word"])
def pack(
    logits,  # (images of a pass, max_det, mh, mw) f32
    placement,  # (B, 8) f32
    extents,  # (B, max_det + 1, 8) i32
    offsets,  # (B, max_det + 1) i64
    tiles,  # (B, max_det + 1) i64
    words,  # (CAPACITY,) i32, written
    first_image: tl.int32,
    images: tl.int32,
    first_word: tl.int64,
    CAPACITY: tl.constexpr,
    MAX_DET: tl.constexpr,
    PLANE_H: tl.constexpr,
    PLANE_W: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    begin = first_image * (MAX_DET + 1)
    end = (first_image + images) * (MAX_DET + 1) - 1
    for tile in range(tl.load(tiles + begin) + tl.program_id(0), tl.load(tiles + end), tl.num_programs(0)):
        # The object with tiles[slot] <= tile < tiles[slot + 1].
        slot, beyond = begin, end
        while beyond - slot > 1:
            middle = (slot + beyond) // 2
            not_after = tl.load(tiles + middle) <= tile
            slot = tl.where(not_after, middle, slot)
            beyond = tl.where(not_after, beyond, middle)
        extent = extents + slot * 8
        left, top = tl.load(extent), tl.load(extent + 1)
        right, bottom = tl.load(extent + 2), tl.load(extent + 3)
        words_high = (bottom - top + 31) // 32
        number = (tile - tl.load(tiles + slot)).to(tl.int32)
        x = left + number // words_high * TILE + tl.arange(0, TILE)
        y = top + number % words_high * 32
        target = tl.load(offsets + slot) - first_word + (x - left).to(tl.int64) * words_high + number % words_high
        written = (x < right) & (target >= 0) & (target < CAPACITY)
        if tl.max(written.to(tl.int32)) != 0:
            image = slot // (MAX_DET + 1)
            factor, first_y, count_y, height, first_x, count_x, width = cuts(placement, image, STRIDE)
            tap_0, weight_0, weight_1, weight_2 = column_taps(tl.minimum(x, right - 1), factor, first_x, count_x, width)
            tap_1, tap_2 = tl.minimum(tap_0 + 1, PLANE_W - 1), tl.minimum(tap_0 + 2, PLANE_W - 1)
            number_in_pass = (image - first_image) * MAX_DET + slot % (MAX_DET + 1)
            plane = logits + number_in_pass.to(tl.int64) * (PLANE_H * PLANE_W)

            before, rest = sample(y, height, count_y)
            step, rest_step = count_y // height, 2 * (count_y % height)
            scale = 1.0 / (2 * height)
            current = tl.full((), -2, tl.int32)  # of the enlarged rows, the one that `near` is
            near, far = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
            slope = far
            word, bit = tl.zeros((TILE,), tl.int32), tl.full((), 1, tl.int32)
            for _ in range(tl.minimum(bottom - y, 32)):
                row = tl.maximum(before, 0)
                if row != current:
                    if row == current + 1:
                        near = far
                    else:
                        near = _enlarged_row(
                            plane, first_y + row, factor,
                            tap_0, tap_1, tap_2, weight_0, weight_1, weight_2, PLANE_H, PLANE_W,
                        )  # fmt: skip
                    far = _enlarged_row(
                        plane, first_y + tl.minimum(row + 1, count_y - 1), factor,
                        tap_0, tap_1, tap_2, weight_0, weight_1, weight_2, PLANE_H, PLANE_W,
                    )  # fmt: skip
                    slope = far - near
                    current = row
                weight = tl.where(before < 0, 0.0, rest * scale)
                word |= tl.where(near + weight * slope > 0, bit, 0)
                bit <<= 1
                rest += rest_step
                carried = rest >= 2 * height
                before += step + carried.to(tl.int32)
                rest -= tl.where(carried, 2 * height, 0)
            tl.store(words + target, word, written)
