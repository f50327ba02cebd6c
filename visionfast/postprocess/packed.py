"""Instance masks as bits, one per pixel of each object's box: how they come from the device, and what becomes of them.

Of an object only its own box is packed: columns ceil(x1) ≤ x < ceil(x2), rows ceil(y1) ≤ y < ceil(y2), clipped to the
image. Column after column, as COCO's run lengths go, and each column from a 32-bit word of its own: bit i of a
column's word k is row 32 k + i of the box, and bits below the box are 0. The words of several objects follow one
another, and `offsets` says where.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError
from visionfast.postprocess.masks import InstanceMasks, counts_from_runs

__all__ = ["box_pixels", "pack_reference", "pixel_counts", "unpack"]

_NONE = np.zeros(0, np.int64)


def box_pixels(xyxy: npt.NDArray[np.float32], image_hw: tuple[int, int]) -> npt.NDArray[np.int64]:
    """The whole pixels of boxes: (N, 4) float32, finite → (N, 4) int64 left, top, right, bottom.

    `left ≤ x < right` and `top ≤ y < bottom` inside the image; both ends are equal on both axes where a box has none.
    """
    height, width = image_hw
    corners: npt.NDArray[np.int64] = np.clip(np.ceil(xyxy), 0, (width, height, width, height)).astype(np.int64)
    corners[(corners[:, 2:] <= corners[:, :2]).any(axis=1)] = 0
    return corners


def pack_reference(
    masks: npt.NDArray[np.bool_], xyxy: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The definition of the format: (N, H, W) bool and (N, 4) float32 boxes → words (K,) int32, offsets (N + 1,) int64.

    Pixels outside of a mask's box are not packed.
    """
    image_hw = (masks.shape[1], masks.shape[2])
    words, offsets = [np.zeros(0, np.int32)], [0]
    for mask, (left, top, right, bottom) in zip(masks, box_pixels(xyxy, image_hw), strict=True):
        bits = np.zeros((right - left, -(-(bottom - top) // 32) * 32), np.uint8)
        bits[:, : bottom - top] = mask[top:bottom, left:right].T
        words.append(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32))
        offsets.append(offsets[-1] + len(words[-1]))
    return np.concatenate(words), np.array(offsets, np.int64)


def pixel_counts(words: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many pixels each object's mask has, (N,) int64: so that those of none need not be unpacked.

    Args:
        words: (K,) int32, of the whole batch.
        offsets: (N + 1,) int64: object i has `words[offsets[i]:offsets[i + 1]]`.
    """
    bits = words[offsets[0] : offsets[-1]].view(np.uint32)
    # Ones of each pair of bits, then of each four, of each byte, of all: Warren, Hacker's Delight, 5-1.
    pairs = bits - ((bits >> np.uint32(1)) & np.uint32(0x55555555))
    fours = (pairs & np.uint32(0x33333333)) + ((pairs >> np.uint32(2)) & np.uint32(0x33333333))
    ones = (((fours + (fours >> np.uint32(4))) & np.uint32(0x0F0F0F0F)) * np.uint32(0x01010101)) >> np.uint32(24)
    until = np.zeros(len(ones) + 1, np.int64)
    np.cumsum(ones, dtype=np.int64, out=until[1:])
    counts: npt.NDArray[np.int64] = np.diff(until[offsets - offsets[0]])
    return counts


def unpack(
    words: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    xyxy: npt.NDArray[np.float32],
    image_hw: tuple[int, int],
) -> InstanceMasks:
    """The masks of one image's N objects, as run lengths: what `InstanceMasks.from_dense` gives for the same pixels.

    The ends of the runs are found on whole words, for all objects at once.

    Args:
        words: (K,) int32, of the whole batch.
        offsets: (N + 1,) int64 or more: object i has `words[offsets[i]:offsets[i + 1]]`.
        xyxy: (N, 4) float32, finite, original pixels: the boxes that were packed.
        image_hw: the original image, pixels.

    Returns:
        N masks, some of them perhaps empty.

    Raises:
        ShapeError: an object's words are not as many as its box has, or are not all there.
    """
    left, top, right, bottom = box_pixels(xyxy, image_hw).T
    columns, words_high = right - left, -(-(bottom - top) // 32)
    steps, expected = np.diff(offsets[: len(xyxy) + 1]), columns * words_high
    if not np.array_equal(steps, expected):
        raise ShapeError(
            f"offsets: expected the words of {len(xyxy)} boxes, {expected[:4].tolist()} and so on, got "
            f"{steps[:4].tolist()} and so on for {len(steps)}: give the boxes that were packed"
        )
    begin, end = int(offsets[0]), int(offsets[len(xyxy)])
    if end > len(words):
        raise ShapeError(f"words: expected at least {end}, got {len(words)}: fetch the further ones first")
    if begin == end:
        return InstanceMasks(tuple(counts_from_runs(_NONE, _NONE, image_hw) for _ in xyxy), image_hw)

    first_column = np.cumsum(columns) - columns  # of all objects' columns, one after another, each object's first
    column = np.arange(int(columns.sum())) - np.repeat(first_column, columns)  # of its object
    high = np.repeat(words_high, columns)
    word = np.repeat(offsets[: len(xyxy)] - begin, columns) + column * high  # each column's first
    position = (np.repeat(left, columns) + column) * image_hw[0] + np.repeat(top, columns)  # of its first pixel
    edge = _edges(words[begin:end].view(np.uint32), word)
    bounds = np.searchsorted(edge[0::2], (offsets[: len(xyxy) + 1] - begin) * 32)  # each object's first run

    pixel = np.full(end - begin, 32, np.int64)  # each word's first, column-major in the image, as steps to sum up
    pixel[word[0]] = position[0]
    pixel[word[1:]] = position[1:] - position[:-1] - 32 * (high[:-1] - 1)
    np.cumsum(pixel, out=pixel)
    start = pixel[edge[0::2] >> 5] + (edge[0::2] & 31)
    last = edge[1::2] - 1  # the run's: the bit after it may be the next column's
    stop = pixel[last >> 5] + (last & 31) + 1
    runs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return InstanceMasks(tuple(counts_from_runs(start[a:b], stop[a:b], image_hw) for a, b in runs), image_hw)


def _edges(bits: npt.NDArray[np.uint32], column_starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where runs of ones start and end, in turn, as bit positions (word × 32 + bit); each ends with its column."""
    before = np.zeros_like(bits)  # the bit before each word
    np.right_shift(bits[:-1], 31, out=before[1:])
    last = np.append(column_starts[1:], len(bits)) - 1  # word of each column
    closing = (last[bits[last] >> 31 != 0] + 1) * 32  # the ends of runs that fill their column's last word
    before[column_starts] = 0
    np.bitwise_or(before, bits << np.uint32(1), out=before)
    changed = np.flatnonzero(before != bits)
    edge = _set_bits((before ^ bits)[changed], changed)
    return _merge(edge, closing)


def _merge(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Two ascending arrays as one."""
    merged = np.empty(len(a) + len(b), np.int64)
    from_b = np.searchsorted(a, b) + np.arange(len(b))
    from_a = np.ones(len(merged), np.bool_)
    from_a[from_b] = False
    merged[from_b], merged[from_a] = b, a
    return merged


def _set_bits(bits: npt.NDArray[np.uint32], word: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The positions word × 32 + bit of all set bits, ascending; `bits` are not 0, `word` ascends.

    A turn takes the lowest bit off every word that still has one: few turns, as most words have one or two.
    """
    found = []  # of each turn: which words, and the positions of their lowest bits
    which = np.arange(len(bits))
    count = np.zeros(len(bits), np.int64)
    while len(bits):
        lowest = bits & (~bits + np.uint32(1))
        exponent = lowest.astype(np.float32).view(np.int32) >> 23  # a power of two is exact in float32
        found.append((which, word[which] * 32 + (exponent - 127)))
        count[which] += 1
        bits = bits ^ lowest
        more = np.flatnonzero(bits)
        bits, which = bits[more], which[more]
    place = np.cumsum(count) - count  # each word's first position among all
    positions = np.empty(int(count.sum()), np.int64)
    for turn, (which, lowest_bit) in enumerate(found):
        positions[place[which] + turn] = lowest_bit
    return positions
