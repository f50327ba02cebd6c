"""Where enlarged mask logits cross a threshold: masks at the original resolution, as runs, without their pixels.

Down a column of the image the enlarged logits are straight lines from knot to knot, which are the rows that the last
step of `visionfast.postprocess.enlarge` reads: at most as many as the network's input has, however high the image. So
a run of pixels begins or ends only between two knots of which one is above the threshold and one is not, and where,
the line between them says. Columns and knots that no logit above the threshold reaches are left out; the others are
worked on in strips, so that beside the runs a few MiB are needed for an image of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from visionfast.postprocess.enlarge import Taps, axis_steps, axis_taps, bounded
from visionfast.types import Letterbox, Resize

__all__ = ["enlarged_pixels", "enlarged_runs"]

_BLOCK = 16  # pixels of one product
_STRIP_VALUES = 1 << 17  # enlarged at once: half a MiB of float32, which stays in the L2 cache


def enlarged_runs(
    logits: npt.NDArray[np.float32], placed: Letterbox, resize: Resize, threshold: float = 0.0
) -> npt.NDArray[np.int64]:
    """One mask: the runs of pixels of the original image whose enlarged logit is above `threshold`.

    The same as `enlarge_reference(logits) > threshold`, but that a pixel whose logit is within rounding of the
    threshold (5e-7 of the logits that it is made of) may fall on either side.

    Args:
        logits: (h, w) float32.
        placed, resize: as in `enlarge_reference`, whose errors these are too.

    Returns:
        (2, R) int64: start and end of each run, as `masks.counts_from_runs` takes them.
    """
    runs = [np.zeros((2, 0), np.int64)]
    for (edge,) in _edges(logits, placed, resize, (threshold,)):
        pairs = edge.reshape(-1, 2).T
        runs.append(pairs[:, pairs[0] < pairs[1]])
    return np.concatenate(runs, axis=1)


def enlarged_pixels(
    logits: npt.NDArray[np.float32], placed: Letterbox, resize: Resize, thresholds: tuple[float, ...]
) -> list[int]:
    """One mask: how many pixels of the original image are above each threshold; as `enlarged_runs`, no run kept."""
    pixels = [0] * len(thresholds)
    for edges in _edges(logits, placed, resize, thresholds):
        pixels = [n + int((edge[1::2] - edge[::2]).sum()) for n, edge in zip(pixels, edges, strict=True)]
    return pixels


@dataclass(frozen=True, slots=True, eq=False)
class _Band:
    """Taps as a band matrix in blocks of rows.

    Attributes:
        blocks: of `_BLOCK` pixels each (the last may have fewer): the logits that they need, and
            (pixels, those logits) float32.
        first, end: (blocks,) int64, of the needed logits; both ascend.
    """

    blocks: tuple[tuple[slice, npt.NDArray[np.float32]], ...]
    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    def touching(self, begin: int, end: int) -> tuple[int, int]:
        """The blocks that may have weight of logits `begin <= p < end`: from the first to the last, exclusive."""
        return int(np.searchsorted(self.end, begin, side="right")), int(np.searchsorted(self.first, end))

    def product(self, logits: npt.NDArray[np.float32], begin: int, end: int) -> npt.NDArray[np.float32]:
        """(logits, m) float32 → (pixels of blocks `begin <= b < end`, m)."""
        # In products so small that BLAS does not share them out among threads: on two cores that other processes kept
        # busy too, its threads waited 15 ms for one another in a product of 0.3 ms.
        pixels = (end - begin - 1) * _BLOCK + len(self.blocks[end - 1][1])
        product = np.empty((pixels, logits.shape[1]), np.float32)
        for i, (needed, matrix) in enumerate(self.blocks[begin:end]):
            np.matmul(matrix, logits[needed], out=product[i * _BLOCK : (i + 1) * _BLOCK])
        return product


def _band(taps: Taps) -> _Band:
    length, width = taps.weight.shape
    pixel = np.arange(length)
    begin = pixel[::_BLOCK]
    first = taps.first[begin].astype(np.int64)
    end = taps.first[np.minimum(begin + _BLOCK, length) - 1].astype(np.int64) + width
    matrices = np.zeros((len(begin), _BLOCK, int((end - first).max())), np.float32)
    block, row = np.divmod(pixel, _BLOCK)
    for k in range(width):
        matrices[block, row, taps.first - first[block] + k] = taps.weight[:, k]
    blocks = (
        (slice(f, e), matrix[: length - p, : e - f])
        for p, f, e, matrix in zip(begin.tolist(), first.tolist(), end.tolist(), matrices, strict=True)
    )
    return _Band(tuple(blocks), first, end)


@dataclass(frozen=True, slots=True, eq=False)
class _Geometry:
    """Attributes:
    columns: of the image.
    knots: the rows that the last step reads; `None` where they are the logits' own.
    source: how many they are.
    position: (H + 2,) float64, each row of the image among the knots, between -∞ and ∞.
    """

    columns: _Band
    knots: _Band | None
    source: int
    position: npt.NDArray[np.float64]

    @property
    def height(self) -> int:
        return len(self.position) - 2

    def row(self, place: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The first row of the image at or behind each place among the knots; H behind the last."""
        # By the rule of `enlarge` in real numbers, which is less than a row off; the table decides between neighbours.
        row = np.ceil((place + 0.5) * (self.height / self.source) - 0.5).astype(np.int64)
        np.clip(row, 0, self.height, out=row)
        row += (self.position[row + 1] < place).view(np.int8) - (self.position[row] >= place).view(np.int8)
        row[place <= 0], row[place > self.source - 1] = 0, self.height  # many rows lie at the first knot, and the last
        return row


@lru_cache(maxsize=8)  # all masks of an image have one; some images are asked about in turn
def _geometry(plane_hw: tuple[int, int], placed: Letterbox, resize: Resize) -> _Geometry:
    down, across = (axis_steps(plane_hw[axis], placed, resize, axis) for axis in (0, 1))
    return _Geometry(
        columns=_band(axis_taps(plane_hw[1], across)),
        knots=_band(axis_taps(plane_hw[0], down[:1])) if len(down) > 1 else None,
        source=plane_hw[0] if len(down) == 1 else placed.resized_hw[0],
        position=np.concatenate(([-np.inf], down[-1].position, [np.inf])),
    )


def _edges(
    logits: npt.NDArray[np.float32], placed: Letterbox, resize: Resize, thresholds: tuple[float, ...]
) -> Iterator[list[npt.NDArray[np.int64]]]:
    """Strip by strip, for each threshold where runs start and end in turn, as column-major pixel indices.

    (2 R,) int64, none less than the one before; a run may be empty, where a line crosses between two pixels, and back.
    """
    geometry = _geometry((logits.shape[0], logits.shape[1]), placed, resize)
    logits = bounded(logits)
    inside = logits > np.float32(min(thresholds))
    row, column = np.flatnonzero(inside.any(axis=1)), np.flatnonzero(inside.any(axis=0))
    if not len(row):
        return
    knot, knots = _knots(logits, geometry.knots, int(row[0]), int(row[-1]) + 1)
    begin, end = geometry.columns.touching(int(column[0]), int(column[-1]) + 1)
    step = max(1, _STRIP_VALUES // (_BLOCK * len(knots)))
    for block in range(begin, end, step):
        strip = geometry.columns.product(knots.T, block, min(block + step, end))  # (columns, knots)
        yield [_strip_edges(strip, level, geometry, knot, block * _BLOCK) for level in thresholds]


def _knots(
    logits: npt.NDArray[np.float32], band: _Band | None, top: int, bottom: int
) -> tuple[int, npt.NDArray[np.float32]]:
    """The knots that logit rows `top <= y < bottom` reach and one more on either side: the first's number, and all."""
    if band is None:
        first = max(0, top - 1)
        return first, logits[first : bottom + 1]
    begin, end = band.touching(top, bottom)
    begin, end = max(0, begin - 1), min(len(band.blocks), end + 1)
    return begin * _BLOCK, band.product(logits, begin, end)


def _strip_edges(
    strip: npt.NDArray[np.float32], threshold: float, geometry: _Geometry, knot: int, column: int
) -> npt.NDArray[np.int64]:
    """Of one strip and threshold.

    Args:
        strip: (columns, knots) float32.
        threshold: of the logits.
        geometry: of the mask.
        knot, column: of the strip's first value.
    """
    (columns, knots), level = strip.shape, np.float32(threshold)
    # One 0 before everything and one below each column: every run then has a start and an end of its own.
    flat = np.zeros(columns * (knots + 1) + 1, np.bool_)
    np.greater(strip, level, out=flat[1:].reshape(columns, knots + 1)[:, :knots])
    change = np.flatnonzero(flat[1:] != flat[:-1])
    x = change // (knots + 1)
    k = change - x * (knots + 1)  # between knots k - 1 and k
    top, bottom = k == 0, k == knots  # of the column: nothing is crossed there
    value = change - x  # in the strip
    after = strip.ravel()[value - bottom].astype(np.float64)
    before = strip.ravel()[value - 1 + top].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = (before - level) / (before - after)  # 0..1, of the way from knot k - 1 to knot k
    crossing[top], crossing[bottom] = 1, 0
    last = (k + (knot - 1)).astype(np.float64)  # the knot before
    place = last + crossing
    # A pixel at the crossing is not above, so a run (each even edge starts one) begins behind it and ends in front of
    # it; but where the sum was rounded to a knot, that knot stays on its own side.
    behind = place == last
    behind[::2] = place[::2] != last[::2] + 1
    place.view(np.int64)[:] += behind  # the next larger number
    y = geometry.row(place)
    edges: npt.NDArray[np.int64] = (column + x) * geometry.height + y
    return edges
