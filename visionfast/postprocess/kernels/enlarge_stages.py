"""The two kernels that enlarge a prompt decoder's mask logits; `enlarge` launches them.

    pack_enlarged    one bit for each pixel of each mask: its enlarged logit is above 0
    count_enlarged   two numbers for each mask: pixels above delta, and above -delta

An enlarged logit is a sum over a few taps along each axis. A program makes 32 rows of some image columns: it walks
down the rows and keeps, enlarged across, the two or three rows of logits that it is between, so that a pixel costs a
multiply-add for each tap, a comparison and a bit; a further row of logits is read only when the walk comes to it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, for Triton's own way to write what is known when a kernel is compiled

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_enlarged", "pack_enlarged"]


@triton.jit
def _weight(entry, number, length, there):
    """The weight of tap `number` of the table's entries."""
    return tl.load(entry + (1 + number) * length, there, 0).to(tl.float32, bitcast=True)


@triton.jit
def _logit(pointer, there):
    """Bounded as in the definition: NaN is far below 0, and no sum is infinite."""
    value = tl.load(pointer, there, 0.0).to(tl.float32)
    return tl.minimum(tl.maximum(tl.where(value == value, value, -1e30), -1e30), 1e30)


@triton.jit
def _across(pointer, w0, w1, w2, there, TAPS: tl.constexpr):
    """A row of logits at the tile's image columns, from their first taps on."""
    value = w0 * _logit(pointer, there) + w1 * _logit(pointer + 1, there)
    if TAPS == 3:
        value += w2 * _logit(pointer + 2, there)
    return value


@triton.jit
def _words(
    planes,  # (TILE,) pointers: of each image column, its mask's logits
    taps,  # (4, height + width) i32, see `enlarge.write_taps`
    x,  # (TILE,) i32, image columns
    there,
    y,  # the first of 32 image rows
    height,
    length,  # height + width
    low,
    high,
    TAPS: tl.constexpr,
    PLANE_W: tl.constexpr,
    TILE: tl.constexpr,
):
    """For each column two words of 32 rows: which logits are above `low`, and which above `high`."""
    entry = taps + height + x
    column = planes + tl.load(entry, there, 0)
    w0, w1 = _weight(entry, 0, length, there), _weight(entry, 1, length, there)
    w2 = _weight(entry, 2, length, there)
    current = tl.full((), -2, tl.int32)  # the row of logits that `row_0` is
    row_0 = tl.zeros((TILE,), tl.float32)
    row_1, row_2 = row_0, row_0
    above_low = tl.zeros((TILE,), tl.int32)
    above_high, bit = above_low, tl.full((), 1, tl.int32)
    for line in range(y, tl.minimum(y + 32, height)):
        first = tl.load(taps + line)
        if first != current:
            start = column + first * PLANE_W
            if first == current + 1:
                row_0, row_1 = row_1, row_2
            else:
                row_0 = _across(start, w0, w1, w2, there, TAPS)
                if TAPS == 3:
                    row_1 = _across(start + PLANE_W, w0, w1, w2, there, TAPS)
            last = _across(start + (TAPS - 1) * PLANE_W, w0, w1, w2, there, TAPS)
            if TAPS == 3:
                row_2 = last
            else:
                row_1 = last
            current = first
        value = _weight(taps + line, 0, length, True) * row_0 + _weight(taps + line, 1, length, True) * row_1
        if TAPS == 3:
            value += _weight(taps + line, 2, length, True) * row_2
        above_low |= tl.where(value > low, bit, 0)
        above_high |= tl.where(value > high, bit, 0)
        bit <<= 1
    return above_low, above_high


@triton.jit
def _ones(word):
    """How many bits are 1 (Warren, Hacker's Delight, 5-1)."""
    pairs = word - ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return (halves + (halves >> 16)) & 0x3F


@triton.jit(do_not_specialize=["begin", "end", "height", "width"])
def pack_enlarged(
    logits,  # (M, PLANE_H, PLANE_W) f32 or f16
    chosen,  # (K,) i32
    taps,  # (4, height + width) i32
    words,  # (end - begin, words of a column) i32, written
    begin: tl.int32,  # of the chosen masks' columns, all in a row, those that are packed
    end: tl.int32,
    height: tl.int32,
    width: tl.int32,
    TAPS: tl.constexpr,
    PLANE_H: tl.constexpr,
    PLANE_W: tl.constexpr,
    TILE: tl.constexpr,
):
    column = begin + tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < end
    mask = tl.load(chosen + column // width, there, 0).to(tl.int64)
    planes = logits + mask * (PLANE_H * PLANE_W)
    y = tl.program_id(0) * 32
    word, _ = _words(planes, taps, column % width, there, y, height, height + width, 0.0, 0.0, TAPS, PLANE_W, TILE)
    target = (column - begin) * tl.num_programs(0) + tl.program_id(0)
    tl.store(words + target, word, there)


@triton.jit(do_not_specialize=["height", "width", "delta"])
def count_enlarged(
    logits,  # (M, PLANE_H, PLANE_W) f32 or f16
    chosen,  # (K,) i32
    taps,  # (4, height + width) i32
    counts,  # (K, 2) i64, added to: pixels above delta, pixels above -delta
    height: tl.int32,
    width: tl.int32,
    delta: tl.float32,
    TAPS: tl.constexpr,
    PLANE_H: tl.constexpr,
    PLANE_W: tl.constexpr,
    TILE: tl.constexpr,
):
    number = tl.program_id(2)
    x = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = x < width
    planes = logits + tl.load(chosen + number).to(tl.int64) * (PLANE_H * PLANE_W) + tl.zeros((TILE,), tl.int32)
    y = tl.program_id(0) * 32
    low, high = _words(planes, taps, x, there, y, height, height + width, -delta, delta, TAPS, PLANE_W, TILE)
    # Whole numbers: the sum does not depend on the order.
    tl.atomic_add(counts + number * 2, tl.sum(tl.where(there, _ones(high), 0)).to(tl.int64))
    tl.atomic_add(counts + number * 2 + 1, tl.sum(tl.where(there, _ones(low), 0)).to(tl.int64))
