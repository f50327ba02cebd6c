"""Percentiles out of buckets, against NumPy on what was observed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visionfast.serving.quantiles import histogram_quantile

UPPER = [0.001, 0.01, 0.1, 1.0, math.inf]
SHARES = st.floats(0.001, 1.0)
SECONDS = st.one_of(st.floats(0, 3), st.sampled_from([0.0, *UPPER[:-1], 1e-9, 1e9]))


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ([0, 0, 0, 0, 0], 0.5, math.nan),
        ([4, 4, 4, 4, 4], 0.5, 0.0005),
        ([0, 4, 4, 4, 4], 0.5, 0.0055),
        ([0, 4, 4, 4, 4], 1.0, 0.01),
        ([0, 0, 0, 0, 4], 0.5, 1.0),  # no end: its beginning
        ([1, 2, 2, 2, 4], 0.5, 0.01),
        ([1, 2, 2, 2, 4], 0.51, 1.0),
        ([0, 0, 1, 1, 1], 1e-9, 0.01 + 0.09 * 1e-9),
    ],
)
def test_by_hand(counts: list[float], q: float, expected: float) -> None:
    np.testing.assert_allclose(histogram_quantile([q], UPPER, counts), [expected], rtol=1e-12)


def test_no_bucket_at_all() -> None:
    assert np.isnan(histogram_quantile([0.5, 0.9], [], [])).all()


@given(st.lists(SECONDS, min_size=1, max_size=200), st.lists(SHARES, min_size=1, max_size=5))
def test_in_the_bucket_of_the_exact_one(observed: list[float], shares: list[float]) -> None:
    counts = [sum(value <= end for value in observed) for end in UPPER]
    found = histogram_quantile(shares, UPPER, counts)
    exact = np.quantile(observed, shares, method="inverted_cdf")
    for mine, other in zip(found, exact, strict=True):
        bucket = int(np.searchsorted(UPPER, other))
        lowest = 0.0 if bucket == 0 else UPPER[bucket - 1]
        assert lowest <= mine <= (UPPER[bucket] if math.isfinite(UPPER[bucket]) else lowest)


@given(st.lists(SECONDS, min_size=1, max_size=50), st.lists(SHARES, min_size=2, max_size=6))
def test_rising(observed: list[float], shares: list[float]) -> None:
    counts = [sum(value <= end for value in observed) for end in UPPER]
    assert (np.diff(histogram_quantile(sorted(shares), UPPER, counts)) >= -1e-15).all()
