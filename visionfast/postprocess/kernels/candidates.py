"""Kernels that choose the candidates of a slot and sort them: `postprocess.boxes.select_candidates` on the GPU.

A candidate is one int64 key, and a greater key comes first:

    bit 31 and up   confidence, the bits of its float32: it is positive and finite, so they order as it does
    bits 0 to 30    2^31 - 1 - (anchor << CLASS_BITS | class): of equal confidences the lower anchor comes first

No two keys are equal, since no two anchors are; so the order in which programs append them to the slot's list does not
matter, and a candidate's place in the sorted list is the number of keys that are greater.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, for Triton's own way to write what is known when a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["anchor_of", "class_of", "rank", "select"]


@triton.jit
def anchor_of(key, CLASS_BITS: tl.constexpr):
    """Column of `predictions`, int32."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)) >> CLASS_BITS


@triton.jit
def class_of(key, CLASS_BITS: tl.constexpr):
    """Class id, int32."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)) & ((1 << CLASS_BITS) - 1)


@triton.jit
def _corners(column, mask, ANCHORS: tl.constexpr):
    """x1, y1, x2, y2 in input pixels, as `postprocess.boxes.cxcywh_to_xyxy`; half of a float is exact."""
    cx = tl.load(column, mask=mask, other=0.0)
    cy = tl.load(column + ANCHORS, mask=mask, other=0.0)
    half_w = tl.load(column + 2 * ANCHORS, mask=mask, other=0.0) * 0.5
    half_h = tl.load(column + 3 * ANCHORS, mask=mask, other=0.0) * 0.5
    return cx - half_w, cy - half_h, cx + half_w, cy + half_h


@triton.jit
def select(
    predictions, placement, wanted, keys, counts, conf,
    ANCHORS: tl.constexpr, ROWS: tl.constexpr, CLASSES: tl.constexpr, CLASS_BITS: tl.constexpr,
    FILTER: tl.constexpr, CLASS_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Appends the keys of BLOCK anchors' candidates to their slot's list. Grid: (blocks of anchors, slots).

    Args:
        predictions: (B, ROWS, ANCHORS) float32.
        placement: (B, 8) float32.
        wanted: (CLASSES,) uint8, 1 for a class that may be found; read if FILTER.
        keys: (B, ANCHORS) int64, written.
        counts: (B,) int32, raised by the number of keys appended.
        conf: float32; candidates are strictly above it.
    """
    slot = tl.program_id(1)
    if tl.load(placement + slot * 8 + 4) == 0.0:  # W: the slot has no image
        return
    anchor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = anchor < ANCHORS
    column = predictions + slot.to(tl.int64) * (ROWS * ANCHORS) + anchor
    x1, y1, x2, y2 = _corners(column, inside, ANCHORS)

    # Each element of the tile sees every CLASS_TILE-th class; they are compared with one another once, at the end.
    infinity: tl.constexpr = float("inf")
    best = tl.full((CLASS_TILE, BLOCK), -infinity, tl.float32)
    best_class = tl.zeros((CLASS_TILE, BLOCK), tl.int32)
    for first in tl.range(0, CLASSES, CLASS_TILE):
        class_id = (first + tl.arange(0, CLASS_TILE))[:, None]
        mask = (class_id < CLASSES) & inside[None, :]
        score = tl.load(column[None, :] + (4 + class_id) * ANCHORS, mask=mask, other=-infinity)
        score = tl.where(score != score, infinity, score)  # NaN drops its anchor, as an infinite best score does
        better = score > best  # strictly, so that of equal scores the lowest class stays
        best = tl.where(better, score, best)
        best_class = tl.where(better, class_id, best_class)
    confidence = tl.max(best, axis=0)  # (BLOCK,)
    class_id = tl.min(tl.where(best == confidence[None, :], best_class, CLASSES), axis=0)

    finite = (tl.abs(x1) < infinity) & (tl.abs(y1) < infinity) & (tl.abs(x2) < infinity) & (tl.abs(y2) < infinity)
    chosen = inside & finite & (confidence > conf) & (confidence < infinity)
    if FILTER:
        chosen = chosen & (tl.load(wanted + class_id, mask=chosen, other=0) != 0)
    chosen_count = tl.sum(chosen.to(tl.int32), axis=0)
    if chosen_count > 0:
        low = (0x7FFFFFFF - ((anchor << CLASS_BITS) | class_id)).to(tl.int64)
        key = (confidence.to(tl.int32, bitcast=True).to(tl.int64) << 31) | low
        start = tl.atomic_add(counts + slot, chosen_count, sem="relaxed")
        place = start + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        # Counts that a failed launch left behind must not lead beyond the list.
        tl.store(keys + slot.to(tl.int64) * ANCHORS + place, key, mask=chosen & (place < ANCHORS))


@triton.jit
def rank(
    predictions, keys, counts, sorted_keys, boxes, labels,
    ANCHORS: tl.constexpr, ROWS: tl.constexpr, CLASS_BITS: tl.constexpr, CAPACITY: tl.constexpr,
    AGNOSTIC: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Sorts the candidates, by counting for each the keys that are greater. Grid: (any number, slots).

    That is quadratic, without one word between programs; for the hundreds of candidates that there are as a rule it
    is the latency of one load, and for all of 8400 it is still 7e7 comparisons, spread over the whole GPU.

    Args:
        predictions: (B, ROWS, ANCHORS) float32.
        keys: (B, ANCHORS) int64, in any order.
        counts: (B,) int32, keys of each slot.
        sorted_keys: (B, CAPACITY) int64, written; of more candidates the first CAPACITY.
        boxes: (B, 4, CAPACITY) float32, written: x1, y1, x2, y2 of the sorted candidates, input pixels.
        labels: (B, CAPACITY) int32, written: which of them may suppress one another; the class, or if AGNOSTIC 0.
    """
    slot = tl.program_id(1)
    count = tl.minimum(tl.load(counts + slot), ANCHORS)
    keys += slot.to(tl.int64) * ANCHORS
    predictions += slot.to(tl.int64) * (ROWS * ANCHORS)
    sorted_keys += slot.to(tl.int64) * CAPACITY
    boxes += slot.to(tl.int64) * (4 * CAPACITY)
    labels += slot.to(tl.int64) * CAPACITY
    for first in tl.range(tl.program_id(0) * MINE, count, tl.num_programs(0) * MINE):
        position = first + tl.arange(0, MINE)
        listed = position < count
        key = tl.load(keys + position, mask=listed, other=0)  # (MINE,)
        greater = tl.zeros((MINE, OTHERS), tl.int32)
        for start in tl.range(0, count, OTHERS):
            other_position = start + tl.arange(0, OTHERS)
            other = tl.load(keys + other_position, mask=other_position < count, other=0)  # 0 is above no key
            greater += (other[None, :] > key[:, None]).to(tl.int32)
        place = tl.sum(greater, axis=1)  # (MINE,)
        stays = listed & (place < CAPACITY)
        x1, y1, x2, y2 = _corners(predictions + anchor_of(key, CLASS_BITS), stays, ANCHORS)
        tl.store(sorted_keys + place, key, mask=stays)
        tl.store(boxes + place, x1, mask=stays)
        tl.store(boxes + CAPACITY + place, y1, mask=stays)
        tl.store(boxes + 2 * CAPACITY + place, x2, mask=stays)
        tl.store(boxes + 3 * CAPACITY + place, y2, mask=stays)
        tl.store(labels + place, tl.zeros_like(place) if AGNOSTIC else class_of(key, CLASS_BITS), mask=stays)
