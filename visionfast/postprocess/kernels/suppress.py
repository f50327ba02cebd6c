"""Kernels of non-maximum suppression among sorted candidates: `postprocess.nms.nms` on the GPU, to the last bit.

Greedy suppression is serial, comparing boxes is not; so `overlap` compares them on the whole GPU and leaves bits, and
`suppress` walks over the bits, one program for each slot, BLOCK candidates a step:

1. those go that overlap one kept in an earlier step;
2. among the rest, "i stays if it is alive and no j before it that overlaps it stays" has exactly one solution, by
   induction over i. It is found by applying the rule to all at once, beginning with all that are alive, until nothing
   changes: each round settles one more link of the longest chain in which one box suppresses the next. In pictures
   that is a handful of rounds, where one box after another would take BLOCK.

Bits are looked up the way that they are used: bit j of row i says that candidate j, which comes before i, suppresses i
if it stays itself. The square of all pairs of the first SIDE candidates is there in full; beyond it, where few images
come to before `max_det` are kept, only each block's own square is, and a block is compared with the kept boxes as it
is reached. So memory, and work that is done in vain, stay bounded.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, for Triton's own way to write what is known when a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

from visionfast.postprocess.kernels.candidates import anchor_of, class_of

__all__ = ["overlap", "suppress"]


@triton.jit
def _load_boxes(boxes, position, mask, CAPACITY: tl.constexpr):
    """x1, y1, x2, y2 of sorted candidates."""
    return (
        tl.load(boxes + position, mask=mask, other=0.0),
        tl.load(boxes + CAPACITY + position, mask=mask, other=0.0),
        tl.load(boxes + 2 * CAPACITY + position, mask=mask, other=0.0),
        tl.load(boxes + 3 * CAPACITY + position, mask=mask, other=0.0),
    )


@triton.jit
def _overlaps(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, iou):
    """`postprocess.nms.box_iou` > iou, operation by operation, for shapes that broadcast.

    Where the intersection is 0 or NaN the quotient is 0 or NaN, above no threshold; most pairs are so. They divide 1
    by 1 instead: operands that are not ordinary send a division on its slow path.
    """
    width = tl.maximum(tl.minimum(ax2, bx2) - tl.maximum(ax1, bx1), 0.0)
    height = tl.maximum(tl.minimum(ay2, by2) - tl.maximum(ay1, by1), 0.0)
    intersection = width * height
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - intersection
    meet = intersection > 0.0
    return meet & (tl.math.div_rn(tl.where(meet, intersection, 1.0), tl.where(meet, union, 1.0)) > iou)


@triton.jit
def overlap(
    boxes, labels, counts, square, diagonal, iou,
    CAPACITY: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Which earlier candidates overlap which later ones too much. Grid: (any number, slots).

    Args:
        boxes: (B, 4, CAPACITY) float32.
        labels: (B, CAPACITY) int32.
        counts: (B,) int32.
        square: (B, SIDE, SIDE / 32) int32, written where a row's block is later than the column's.
        diagonal: (B, CAPACITY, BLOCK / 32) int32, written: each candidate against its own block.
        iou: float32; overlapping is strictly above it.
    """
    slot = tl.program_id(1)
    count = tl.minimum(tl.load(counts + slot), CAPACITY)
    boxes += slot.to(tl.int64) * (4 * CAPACITY)
    labels += slot.to(tl.int64) * CAPACITY
    square += slot.to(tl.int64) * (SIDE * (SIDE // 32))
    diagonal += slot.to(tl.int64) * (CAPACITY * (BLOCK // 32))
    blocks = tl.cdiv(count, BLOCK)
    word = tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    for item in tl.range(tl.program_id(0), tl.cdiv(count, TILE) * blocks, tl.num_programs(0)):
        first, block = (item // blocks) * TILE, item % blocks
        own_block = first // BLOCK
        if (block == own_block) | ((block < own_block) & (first < SIDE)):
            row = first + tl.arange(0, TILE)  # (TILE,)
            column = block * BLOCK + word[:, None] * 32 + bit[None, :]  # (BLOCK / 32, 32)
            a = row[:, None, None]
            b = column[None, :, :]
            ax1, ay1, ax2, ay2 = _load_boxes(boxes, a, a < count, CAPACITY)
            bx1, by1, bx2, by2 = _load_boxes(boxes, b, b < count, CAPACITY)
            over = _overlaps(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, iou)  # (TILE, BLOCK / 32, 32)
            over = over & (tl.load(labels + a, mask=a < count, other=0) == tl.load(labels + b, mask=b < count, other=0))
            bits = tl.sum(over.to(tl.int32) << bit[None, None, :], axis=2)  # (TILE, BLOCK / 32)
            mask = (row < count)[:, None]
            if block == own_block:
                earlier = row[:, None] - (block * BLOCK + word * 32)[None, :]  # so many of a word's candidates
                before = (1 << tl.minimum(tl.maximum(earlier, 0), 31)) - 1
                bits &= tl.where(earlier >= 32, -1, before)
                tl.store(diagonal + row[:, None] * (BLOCK // 32) + word[None, :], bits, mask=mask)
            else:
                tl.store(square + row[:, None] * (SIDE // 32) + block * (BLOCK // 32) + word[None, :], bits, mask=mask)


@triton.jit
def _pack(flags, BLOCK: tl.constexpr):
    """(BLOCK,) of 0 and 1 → (BLOCK / 32,) int32, the first one in the lowest bit."""
    rows = tl.reshape(flags.to(tl.int32), (BLOCK // 32, 32))
    return tl.sum(rows << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def _write(found, place, keep, key, x1, y1, x2, y2, placement, CLASS_BITS: tl.constexpr):
    """Objects' rows of `found`: boxes as from `postprocess.boxes.unletterbox_boxes`."""
    left, top = tl.load(placement), tl.load(placement + 1)
    gain_x, gain_y = tl.load(placement + 2), tl.load(placement + 3)
    image_w, image_h = tl.load(placement + 4), tl.load(placement + 5)
    row = found + (1 + place) * 8
    x1 = tl.minimum(tl.maximum(tl.math.div_rn(x1 - left, gain_x), 0.0), image_w)
    y1 = tl.minimum(tl.maximum(tl.math.div_rn(y1 - top, gain_y), 0.0), image_h)
    x2 = tl.minimum(tl.maximum(tl.math.div_rn(x2 - left, gain_x), 0.0), image_w)
    y2 = tl.minimum(tl.maximum(tl.math.div_rn(y2 - top, gain_y), 0.0), image_h)
    tl.store(row, x1.to(tl.int32, bitcast=True), mask=keep)
    tl.store(row + 1, y1.to(tl.int32, bitcast=True), mask=keep)
    tl.store(row + 2, x2.to(tl.int32, bitcast=True), mask=keep)
    tl.store(row + 3, y2.to(tl.int32, bitcast=True), mask=keep)
    tl.store(row + 4, (key >> 31).to(tl.int32), mask=keep)
    tl.store(row + 5, class_of(key, CLASS_BITS), mask=keep)
    tl.store(row + 6, anchor_of(key, CLASS_BITS), mask=keep)
    tl.store(row + 7, tl.zeros_like(place), mask=keep)


@triton.jit
def suppress(
    sorted_keys, boxes, labels, counts, square, diagonal, placement, kept, kept_bits, found, iou,
    CAPACITY: tl.constexpr, CLASS_BITS: tl.constexpr, SIDE: tl.constexpr, MAX_DET: tl.constexpr,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, JUDGES: tl.constexpr,
):  # fmt: skip
    """Finds who stays, writes the objects and the header, and sets the slot's count back to 0. Grid: (slots,).

    Args:
        sorted_keys: (B, CAPACITY) int64.
        boxes: (B, 4, CAPACITY) float32.
        labels: (B, CAPACITY) int32.
        counts: (B,) int32; 0 afterwards, for the next image.
        square, diagonal: from `overlap`.
        placement: (B, 8) float32.
        kept: (B, MAX_DET) int32, scratch: positions of those who stay.
        kept_bits: (B, SIDE / 32) int32, scratch: the same as bits.
        found: (B, 1 + MAX_DET, 8) int32, written.
        iou: float32, the one given to `overlap`.
    """
    slot = tl.program_id(0)
    count = tl.minimum(tl.load(counts + slot), CAPACITY)
    sorted_keys += slot.to(tl.int64) * CAPACITY
    boxes += slot.to(tl.int64) * (4 * CAPACITY)
    labels += slot.to(tl.int64) * CAPACITY
    square += slot.to(tl.int64) * (SIDE * (SIDE // 32))
    diagonal += slot.to(tl.int64) * (CAPACITY * (BLOCK // 32))
    placement += slot * 8
    kept += slot.to(tl.int64) * MAX_DET
    kept_bits += slot * (SIDE // 32)
    found += slot.to(tl.int64) * ((1 + MAX_DET) * 8)

    start = tl.zeros((), tl.int32)
    kept_count = tl.zeros((), tl.int32)
    while (start < count) & (kept_count < MAX_DET):
        position = start + tl.arange(0, BLOCK)  # (BLOCK,)
        listed = position < count
        block_word = tl.arange(0, BLOCK // 32)
        own = tl.load(
            diagonal + position[:, None] * (BLOCK // 32) + block_word[None, :], mask=listed[:, None], other=0
        )  # (BLOCK, BLOCK / 32)

        if (SIDE >= CAPACITY) | (start < SIDE):
            hits = tl.zeros((BLOCK, WORDS), tl.int32)
            for first in tl.range(0, start // 32, WORDS):
                word = first + tl.arange(0, WORDS)
                earlier = word < start // 32
                judges = tl.load(kept_bits + word, mask=earlier, other=0)
                mask = listed[:, None] & earlier[None, :]
                over = tl.load(square + position[:, None] * (SIDE // 32) + word[None, :], mask=mask, other=0)
                hits |= over & judges[None, :]
            gone = tl.max((hits != 0).to(tl.int32), axis=1)  # (BLOCK,)
        else:
            gone = tl.zeros((BLOCK,), tl.int32)
            bx1, by1, bx2, by2 = _load_boxes(boxes, position[:, None], listed[:, None], CAPACITY)
            label = tl.load(labels + position, mask=listed, other=0)
            for first in tl.range(0, kept_count, JUDGES):
                judge = first + tl.arange(0, JUDGES)
                judging = judge < kept_count
                at = tl.load(kept + judge, mask=judging, other=0)
                ax1, ay1, ax2, ay2 = _load_boxes(boxes, at[None, :], judging[None, :], CAPACITY)
                over = _overlaps(ax1, ay1, ax2, ay2, bx1, by1, bx2, by2, iou)  # (BLOCK, JUDGES)
                same = tl.load(labels + at, mask=judging, other=-1)[None, :] == label[:, None]
                gone |= tl.max((over & same).to(tl.int32), axis=1)

        alive = listed.to(tl.int32) & (1 - gone)
        keep = alive
        bits = _pack(alive, BLOCK)  # (BLOCK / 32,)
        settled = tl.zeros((), tl.int32)
        while settled == 0:
            gone = tl.max(((own & bits[None, :]) != 0).to(tl.int32), axis=1)
            keep = alive & (1 - gone)
            thinned = _pack(keep, BLOCK)
            settled = tl.min((thinned == bits).to(tl.int32), axis=0)
            bits = thinned

        place = kept_count + tl.cumsum(keep, axis=0) - 1
        tl.store(kept + place, position, mask=(keep != 0) & (place < MAX_DET))
        tl.store(kept_bits + start // 32 + block_word, bits, mask=start // 32 + block_word < SIDE // 32)
        kept_count = tl.minimum(kept_count + tl.sum(keep, axis=0), MAX_DET)
        start += BLOCK
        tl.debug_barrier()  # the next step reads what other threads have just stored

    for first in tl.range(0, kept_count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        position = tl.load(kept + place, mask=place < kept_count, other=0)
        key = tl.load(sorted_keys + position, mask=place < kept_count, other=0)
        x1, y1, x2, y2 = _load_boxes(boxes, position, place < kept_count, CAPACITY)
        _write(found, place, place < kept_count, key, x1, y1, x2, y2, placement, CLASS_BITS)
    column = tl.arange(0, 8)
    header = tl.where(column == 0, kept_count, tl.where(column == 1, count, 0))
    tl.store(found + column, header)
    tl.store(counts + slot, 0)
