"""Fits and knees on curves whose law is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from visionfast.bench.scaling import Curve, Law, fit, knee
from visionfast.errors import OptionError


@given(st.floats(0.01, 1e3), st.floats(0.001, 1e3), st.sampled_from(["linear", "shared"]))
def test_a_law_without_noise_is_found(fixed: float, slope: float, law: Law) -> None:
    x = [1.0, 2.0, 3.0, 5.0, 8.0]
    y = [fixed + slope * (v if law == "linear" else 1 / v) for v in x]
    found = fit(law, x, y)
    assert found is not None
    assert found.fixed == pytest.approx(fixed, rel=1e-5, abs=1e-6 * (fixed + slope))
    assert found.slope == pytest.approx(slope, rel=1e-5, abs=1e-6 * (fixed + slope))
    assert found.error < 1e-6


def test_noise_moves_it_little() -> None:
    random = np.random.default_rng(0)
    x = [0.02, 0.3, 0.9, 2.1, 3.7, 8.3]
    found = fit("linear", x, [(30 + 4 * v) * random.lognormal(0, 0.02) for v in x])
    assert found is not None
    assert found.fixed == pytest.approx(30, rel=0.05)
    assert found.slope == pytest.approx(4, rel=0.15)
    assert found.error < 0.06


@pytest.mark.parametrize(
    ("law", "x", "y", "fixed", "slope"),
    [
        ("linear", [1, 2, 3], [5, 5, 5], 5, 0),
        ("linear", [1, 2, 3], [6, 5, 4], None, 0),  # it falls: a negative slope is none
        ("linear", [1, 2, 4], [0.5, 1.5, 3.6], 0, None),  # a negative cost at 0 is none
        ("shared", [1, 2, 4], [8, 4, 2], 0, 8),
        ("linear", [0, 10], [3, 23], 3, 2),
    ],
)
def test_neither_part_is_negative(law: Law, x: list[float], y: list[float], fixed: float, slope: float) -> None:
    found = fit(law, x, y)
    assert found is not None
    assert min(found.fixed, found.slope) >= 0
    if fixed is not None:
        assert found.fixed == pytest.approx(fixed, abs=1e-9)
    if slope is not None:
        assert found.slope == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize(("x", "y"), [([], []), ([1], [2]), ([2, 2], [1, 3])])
def test_too_few_points_have_no_fit_and_no_knee(x: list[float], y: list[float]) -> None:
    assert fit("linear", x, y) is None
    assert knee("linear", x, y) is None


@pytest.mark.parametrize(
    ("law", "x", "y"),
    [
        ("linear", [1, 2], [1]),
        ("linear", [1, 2], [1, 0]),
        ("linear", [1, 2], [1, math.nan]),
        ("linear", [-1, 2], [1, 2]),
        ("shared", [0, 2], [1, 2]),
        ("linear", [1, math.inf], [1, 2]),
    ],
)
def test_what_is_no_curve_is_refused(law: Law, x: list[float], y: list[float]) -> None:
    with pytest.raises(OptionError, match="expected as many finite x as y"):
        fit(law, x, y)


@pytest.mark.parametrize(
    ("law", "x", "y", "at"),
    [
        ("linear", [1, 5, 20], [12, 20, 50], 5),  # 10 + 2 x: both parts are 10 at 5
        ("linear", [1, 2, 3], [12, 14, 16], None),  # 5 is beyond the points
        ("linear", [1, 2, 3], [5, 5, 5], None),
        ("shared", [1, 2, 4, 10], [61, 31, 16, 7], 8),  # 1 + 60 / x: at 8 one more saves 0.83 of 8.5
        ("shared", [1, 2, 4, 8], [40, 35, 32.5, 31.25], 2),  # 30 + 10 / x: from 1 to 2 it saves an eighth
        ("saturating", [1, 2, 3, 4], [10, 20, 29, 30], 3),
        ("saturating", [1, 2], [10, 9], 1),
        ("saturating", [], [], None),
    ],
)
def test_knees(law: Law, x: list[float], y: list[float], at: float | None) -> None:
    got = knee(law, x, y)
    assert got == (None if at is None else pytest.approx(at))


def test_a_curve_says_what_it_shows() -> None:
    y = tuple((10 + 2 * v, 10 + 2 * v, 500.0) for v in (1, 5, 20))  # a disturbed round moves no median
    curve = Curve("objects", "objects", "ms an image", "linear", (1, 5, 20), y)
    assert curve.medians.tolist() == [12, 20, 50]
    assert curve.in_words == (
        "10.0 ms fixed + 2.00 ms for each object (points within 0% of it). Knee at 5 objects: from there on, what "
        "grows costs more than what is fixed."
    )
    threads = Curve("threads", "threads", "ms an image", "shared", (1, 2), ((30.0,), (20.0,)))
    assert threads.in_words.startswith("10.0 ms that more threads do not shorten + 20.0 ms that they share")
    rate = Curve("images at once", "images at once", "images/s", "saturating", (1, 2), ((10.0,), (20.0,)))
    assert rate.in_words == "Most of the highest rate is there with 2 images at once."
    wild = Curve("batch", "images", "ms a call", "linear", (1, 2, 4), ((10.0,), (90.0,), (20.0,)))
    assert not wild.follows
    assert wild.knee is None
    assert wild.in_words.startswith("The points do not follow its law")
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'visionfast[bench]'")
    for one in (curve, threads, rate, wild):
        (axes,) = one.figure().axes
        assert axes.get_xlabel() == one.x_unit
        assert axes.get_ylabel() == one.y_unit
