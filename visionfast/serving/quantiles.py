"""Percentiles out of a histogram's buckets, as Prometheus has them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["histogram_quantile"]


def histogram_quantile(q: npt.ArrayLike, upper: npt.ArrayLike, cumulative: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The value below which a share `q` of what was observed lies, by linear interpolation within its bucket.

    As the function of that name in Prometheus's documentation for classic histograms: the lowest bucket begins at 0,
    and what lies in the highest, which has no end, is given as its beginning. The result is in the bucket that
    the exact value (`numpy.quantile` with `method="inverted_cdf"`) is in.

    Args:
        q: (Q,), above 0 and up to 1.
        upper: (K,) upper ends of the buckets, rising; the last is infinite, the first is positive.
        cumulative: (K,) how many observations are at most as large; never falling.

    Returns:
        (Q,) f64, in the unit of `upper`; NaN where nothing was observed.
    """
    shares, ends, counts = (np.asarray(some, np.float64) for some in (q, upper, cumulative))
    if not len(counts) or not counts[-1] > 0:
        return np.full(shares.shape, np.nan)
    rank = shares * counts[-1]
    bucket = np.searchsorted(counts, rank, side="left").clip(max=len(counts) - 1)  # (Q,) the first that reaches it
    starts, before = np.concatenate(([0.0], ends[:-1])), np.concatenate(([0.0], counts[:-1]))
    inside = counts[bucket] - before[bucket]
    with np.errstate(invalid="ignore"):
        found: npt.NDArray[np.float64] = starts[bucket] + (ends - starts)[bucket] * (rank - before[bucket]) / inside
    found = np.clip(found, starts[bucket], ends[bucket])  # rounding may lead just out of it
    return np.where(np.isinf(ends[bucket]), starts[bucket], found)
