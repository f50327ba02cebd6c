"""Principal components as colours, held to a singular value decomposition."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from visionfast.errors import InputError, ShapeError
from visionfast.postprocess.principal import PrincipalBasis, principal_basis

GREY = 128


def by_svd(features: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(3, D) axes, whichever their signs, and (3,) singular values, of (N, D)."""
    rows = features.astype(np.float64)
    _, sizes, axes = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=True)
    return axes[:3], np.pad(sizes, (0, 3))[:3]


@st.composite
def clouds(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """(N, D) float32 with three spreads that differ, anywhere and of any scale."""
    n, d = draw(st.integers(4, 60)), draw(st.integers(3, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spreads = np.zeros(d)
    spreads[:3] = 9, 3, 1
    turned, _ = np.linalg.qr(rng.normal(size=(d, d)))
    scale = 10.0 ** draw(st.integers(-12, 12))
    cloud = (rng.exponential(size=(n, d)) * spreads) @ turned + rng.normal(size=d) * 10
    return (cloud * scale).astype(np.float32)


@settings(deadline=None)
@given(clouds())
def test_axes_and_colours_are_those_of_the_svd(features: npt.NDArray[np.float32]) -> None:
    basis = principal_basis(features)
    axes, sizes = by_svd(features)
    assume((sizes[:-1] > 1.2 * sizes[1:]).all() and sizes[2] > 1e-3 * sizes[0])
    signs = np.sign(np.sum(axes * basis.axes, axis=1))
    np.testing.assert_allclose(basis.axes, signs[:, None] * axes, atol=1e-5)
    projected = (features.astype(np.float64) - features.astype(np.float64).mean(axis=0)) @ (signs[:, None] * axes).T
    low, high = np.quantile(projected, 0.01, axis=0), np.quantile(projected, 0.99, axis=0)
    expected = 255 * np.clip((projected - low) / (high - low), 0, 1)
    assert np.abs(basis.colours(features) - expected).max() < 0.51


@settings(deadline=None)
@given(clouds(), st.integers(0, 2**32 - 1))
def test_float32_noise_changes_no_colour(features: npt.NDArray[np.float32], seed: int) -> None:
    axes, sizes = by_svd(features)
    assume((sizes[:-1] > 1.2 * sizes[1:]).all() and sizes[2] > 0.02 * sizes[0])
    projected = (features - features.mean(axis=0)).astype(np.float64) @ axes.T
    skewness = np.mean((projected / np.sqrt(np.mean(projected**2, axis=0))) ** 3, axis=0)
    assume((np.abs(skewness) > 0.01).all())  # the documented edge, where either side is as good
    noise = np.random.default_rng(seed).normal(size=features.shape) * 1e-6 * np.abs(features).mean()
    nudged = (features + noise).astype(np.float32)
    first, second = principal_basis(features), principal_basis(nudged)
    assert np.abs(first.colours(features).astype(int) - second.colours(nudged)).max() <= 1


def test_the_side_that_lies_further_out_is_bright() -> None:
    features = np.zeros((100, 8), np.float32)
    features[:10, 2] = -5  # a few that are unlike the many
    basis = principal_basis(features)
    colours = basis.colours(features)
    assert basis.axes[0, 2] == -1
    assert (colours[:10, 0] == 255).all()
    assert (colours[10:, 0] == 0).all()
    assert (colours[:, 1:] == GREY).all()


def test_neither_the_order_nor_the_shape_matters() -> None:
    features = np.random.default_rng(0).exponential(size=(6, 7, 16)).astype(np.float32)
    colours = principal_basis(features).colours(features)
    assert colours.shape == (6, 7, 3)
    shuffled = np.random.default_rng(1).permutation(42)
    other = principal_basis(features.reshape(-1, 16)[shuffled])
    assert np.abs(other.colours(features).astype(int) - colours).max() <= 1


@pytest.mark.parametrize("features", [np.full((4, 4, 8), 3.3, np.float32), np.zeros((1, 1, 5)), np.ones((1, 384))])
def test_what_is_all_alike_is_grey(features: npt.NDArray[Any]) -> None:
    basis = principal_basis(features)
    assert (basis.axes == 0).all()
    assert (basis.colours(features) == GREY).all()


def test_float32_rounding_is_no_component() -> None:
    rng = np.random.default_rng(0)
    features = (100 + 1e-6 * rng.normal(size=(50, 8))).astype(np.float32)
    assert (principal_basis(features).colours(features) == GREY).all()


@pytest.mark.parametrize("rank", [1, 2])
def test_components_that_are_not_there_are_grey(rank: int) -> None:
    rng = np.random.default_rng(0)
    features = (rng.exponential(size=(30, rank)) @ rng.normal(size=(rank, 12))).astype(np.float32)
    colours = principal_basis(features).colours(features)
    assert (np.ptp(colours[:, :rank].astype(int), axis=0) == 255).all()
    assert (colours[:, rank:] == GREY).all()


@pytest.mark.parametrize("channels", [1, 2])
def test_fewer_channels_than_colours(channels: int) -> None:
    features = np.random.default_rng(0).exponential(size=(30, channels)).astype(np.float32)
    colours = principal_basis(features).colours(features)
    assert (colours[:, channels:] == GREY).all()
    assert np.ptp(colours[:, 0].astype(int)) == 255


def test_two_vectors_are_black_and_white() -> None:
    features = np.array([[0, 0, 0], [1, 2, 4]], np.float32)
    assert sorted(principal_basis(features).colours(features)[:, 0].tolist()) == [0, 255]


def test_one_odd_vector_does_not_take_the_contrast() -> None:
    rng = np.random.default_rng(0)
    features = rng.uniform(size=(500, 6)).astype(np.float32) * [10, 1, 1, 1, 1, 1]
    features[0, 0] = 1000
    basis = principal_basis(features)
    red = basis.colours(features)[:, 0]
    assert red[0] == 255
    assert np.ptp(np.quantile(red[1:], [0.1, 0.9])) > 150


def test_one_odd_vector_among_equals_is_seen() -> None:
    features = np.zeros((500, 6), np.float32)
    features[3, 1] = 1  # both percentiles are those of the many
    colours = principal_basis(features).colours(features)
    assert colours[3, 0] == 255
    assert (np.delete(colours[:, 0], 3) == 0).all()


def test_a_shared_basis_gives_one_vector_one_colour() -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.exponential(size=(4, 4, 8)).astype(np.float32) for _ in range(2))
    second[0, 0] = first[2, 3]
    basis = principal_basis(np.concatenate([first.reshape(-1, 8), second.reshape(-1, 8)]))
    assert (basis.colours(second)[0, 0] == basis.colours(first)[2, 3]).all()


def test_sizes_to_float32s_end() -> None:
    features = np.array([[3e38, 0, 0], [-3e38, 0, 0], [3e38, 1e38, 0]], np.float32)
    colours = principal_basis(features).colours(features)
    assert np.ptp(colours[:, 0].astype(int)) == 255


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    features = np.ones((3, 4), np.float32)
    basis = principal_basis(features)
    features[1, 2] = bad
    for refuses in (principal_basis, basis.colours):
        with pytest.raises(InputError, match=r"^features: expected finite numbers, got NaN or Inf in 1 of 3 vectors$"):
            refuses(features)


@pytest.mark.parametrize("shape", [(0, 4), (4,), (0, 3, 8), (3, 0)])
def test_no_vectors(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"expected .* with at least one vector"):
        principal_basis(np.zeros(shape, np.float32))


def test_another_number_of_channels() -> None:
    basis: PrincipalBasis = principal_basis(np.ones((3, 4), np.float32))
    with pytest.raises(ShapeError, match=r"expected \(…, 4\), got \(3, 5\)"):
        basis.colours(np.ones((3, 5), np.float32))
    assert basis.colours(np.ones((0, 2, 4), np.float32)).shape == (0, 2, 3)
