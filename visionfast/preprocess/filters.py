"""The weights of Pillow's antialiased resizes: every output pixel is a weighted sum of the image's along one axis.

A filter is as wide as the reduction, pixel centres are at halves; what would lie outside the image is left out and the
other weights scaled to a sum of 1 (`src/libImaging/Resample.c`, repeated here to the last bit). Any part of a resize
has the weights of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["FRACTION_BITS", "Filter", "cubic", "fixed_point", "triangle"]

FRACTION_BITS = 22  # of Pillow's weights: 32, less 8 of the pixel and 2 to spare

_AT_ONCE = 1 << 13  # weights: what is computed on the way to them stays in a core's cache


class Filter(Protocol):
    """`triangle` or `cubic`."""

    def __call__(
        self, length: int, source: int, first: int = 0, last: int | None = None, /
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The weights for output pixels `first` to `last` of `length`, made from `source` pixels.

        Returns:
            start: (n,) the first pixel that counts for each; never falls from one to the next.
            weights: (n, K) of that pixel and those behind it, each row with a sum of 1. Beyond the filter, and so
                beyond the image, they are 0.
        """
        ...


def triangle(
    length: int, source: int, first: int = 0, last: int | None = None, /
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Pillow's `BILINEAR`; see `Filter`."""
    return _weights(lambda x: np.maximum(1 - np.abs(x), 0), 1, length, source, first, last)


def cubic(
    length: int, source: int, first: int = 0, last: int | None = None, /
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Pillow's `BICUBIC`: Keys' cubic convolution with a = -0.5; see `Filter`. Its outer weights are negative."""
    return _weights(_keys, 2, length, source, first, last)


def _keys(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """R. Keys, Cubic Convolution Interpolation for Digital Image Processing (1981), in Pillow's order of operations."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _weights(
    shape: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]],
    support: int,
    length: int,
    source: int,
    first: int,
    last: int | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    scale = source / length
    stretch = max(scale, 1.0)  # an enlargement interpolates between neighbours
    width = support * stretch  # half the filter's
    centre = (np.arange(first, length if last is None else last) + 0.5) * scale
    start = np.maximum((centre - width + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + width + 0.5).astype(np.int64), source)
    weights = np.empty((len(start), int((end - start).max())))  # (n, K)
    step = max(1, _AT_ONCE // len(start))
    for k in range(0, weights.shape[1], step):
        some = weights[:, k : k + step]
        pixels = start[:, None] + np.arange(k, k + some.shape[1])
        some[...] = shape((pixels - centre[:, None] + 0.5) * (1 / stretch))
        some[pixels >= end[:, None]] = 0
    # One after the other, as Pillow adds them up: another order may differ in the last bit.
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]
    return start, weights


def fixed_point(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """As Pillow weighs 8-bit pixels: in units of 2^-22, halves away from zero."""
    scaled = weights * (1 << FRACTION_BITS)
    scaled += np.copysign(0.5, weights)
    return scaled.astype(np.int64)
