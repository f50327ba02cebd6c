"""A resize as a product with a matrix that is zero outside a narrow band, in pieces for the BLAS.

Neighbouring output pixels are made from almost the same pixels of the image: the rows of a few of them are one dense
band. A BLAS multiplies with it, zeros and all, faster than a loop does without them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.preprocess.filters import FRACTION_BITS, Filter, fixed_point

__all__ = ["Band", "BandedResize"]

_LONG = 1 << 16  # a longer side than a JPEG's: its matrix is made row by row, and not kept


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Some of a resize's rows: `result[made] = weights @ source[taken]`.

    Attributes:
        made: output pixels, counted from the first that is kept.
        taken: pixels of the image.
        weights: (made, taken).
    """

    made: slice
    taken: slice
    weights: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BandedResize:
    """The matrix that makes `length` pixels from `source`, along one axis.

    Attributes:
        weigh: `triangle` or `cubic`.
        length, source: pixels.
        rows: of a band, at most. 1 where `source` is longer than a JPEG's side can be.
        kept: the output pixels that are wanted, from the first to before the last; `None`: all.
        fixed: float64 weights, rounded as Pillow rounds them for 8-bit pixels; otherwise float32 ones.
    """

    weigh: Filter
    length: int
    source: int
    rows: int
    kept: tuple[int, int] | None = None
    fixed: bool = False

    def groups(self) -> Iterable[tuple[Band, ...]]:
        """The bands in order; as many at once as may be held at once."""
        if self.source <= _LONG:
            yield _short(self)
        else:
            for row in range(*self._kept):
                yield (self._row(row),)

    def bands(self) -> Iterator[Band]:
        """The bands in order."""
        for group in self.groups():
            yield from group

    @property
    def changes_nothing(self) -> bool:
        """Whether the pixels are their own weighted sums."""
        return self.length == self.source

    def touched(self) -> slice:
        """The pixels of the image that count."""
        first, last = self._kept
        if self.changes_nothing:
            return slice(first, last)
        ends = _short(self) if self.source <= _LONG else (self._row(first), self._row(last - 1))
        return slice(ends[0].taken.start, ends[-1].taken.stop)

    @property
    def _kept(self) -> tuple[int, int]:
        return self.kept or (0, self.length)

    def _row(self, row: int) -> Band:
        start, weights = self.weigh(self.length, self.source, row, row + 1)
        made, taken = row - self._kept[0], slice(int(start[0]), int(start[0]) + weights.shape[1])
        return Band(slice(made, made + 1), taken, self._numbers(weights))

    def _numbers(self, weights: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        if self.fixed:
            return fixed_point(weights) * 2.0**-FRACTION_BITS
        return weights.astype(np.float32)


@functools.lru_cache(maxsize=16)
def _short(resize: BandedResize) -> tuple[Band, ...]:
    start, weights = resize.weigh(resize.length, resize.source, *resize._kept)  # (n,), (n, K)
    n, k = weights.shape
    offset = start - start[np.arange(n) // resize.rows * resize.rows]  # (n,) from the first pixel of each row's band
    matrix = np.zeros((n, int(offset.max()) + k), np.float64 if resize.fixed else np.float32)
    np.put_along_axis(matrix, offset[:, None] + np.arange(k), resize._numbers(weights), axis=1)
    bands = []
    for first in range(0, n, resize.rows):
        last = min(first + resize.rows, n)
        begin, width = int(start[first]), int(offset[last - 1]) + k
        taken = slice(begin, min(begin + width, resize.source))  # the weights beyond the image are 0
        # A copy: the BLAS is slow where the rows of a matrix don't lie together.
        bands.append(Band(slice(first, last), taken, matrix[first:last, : taken.stop - taken.start].copy()))
    return tuple(bands)
