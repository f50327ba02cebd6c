"""Patch features as colours: their three principal components as red, green and blue, the way DINO is looked at.

What lies along one direction of the features gets one colour, so that parts that the network takes for the same thing
look alike. The colours have no meaning of their own: another image, with a basis of its own, has others.

As in the figures of DINOv2 (Oquab et al., 2023, fig. 1) and DINOv3 (Siméoni et al., 2025), whose makers choose signs
and ranges by eye; here both follow rules, so that one engine gives one picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.errors import InputError, ShapeError
from visionfast.types import FloatArray

__all__ = ["PrincipalBasis", "principal_basis"]

_COMPONENTS = 3
_GREY = 128
_RANGE = (0.01, 0.99)  # what lies beyond is clipped: one odd patch would take the contrast from all the others
_FLOOR = 1e-6  # of the features' own size: below this, a component is float32's rounding
_SYMMETRIC = 1e-3  # a skewness below this says nothing of a side


@dataclass(frozen=True, slots=True, eq=False)
class PrincipalBasis:
    """Where features lie, and how they become colours (`principal_basis` makes it).

    Attributes:
        mean: (D,) float64.
        axes: (3, D) float64 unit vectors, by falling variance; 0 where the features have fewer components.
        low, high: (3,) float64, the projections that become 0 and 255; equal where there is no component.
    """

    mean: npt.NDArray[np.float64]
    axes: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def colours(self, features: FloatArray) -> npt.NDArray[np.uint8]:
        """(…, D) → (…, 3) uint8 RGB; a component that is not there is grey, 128.

        Raises:
            ShapeError: another number of channels.
            InputError: NaN or Inf.
        """
        if features.shape[-1:] != self.mean.shape:
            raise ShapeError(f"features: expected (…, {len(self.mean)}), got {features.shape}")
        rows = _finite(features)
        spread = self.high - self.low
        share = (rows @ self.axes.T - self.mean @ self.axes.T - self.low) / np.where(spread > 0, spread, 1)  # (N, 3)
        levels = np.where(spread > 0, np.rint(255 * np.clip(share, 0, 1)), _GREY)
        return levels.astype(np.uint8).reshape(*features.shape[:-1], _COMPONENTS)


def principal_basis(features: FloatArray) -> PrincipalBasis:
    """The basis in which features are seen best: three principal components, and the range of each.

    Centred; not whitened. An axis and its opposite are the same component: the one is taken on whose side the
    projections lie further out (positive skewness), for that hangs on all of them and turns over only where both sides
    are alike; there (|skewness| < 0.001) the axis' own entries decide by the same rule. The 1st and 99th percentile of
    the projections are black and white of their channel, or the ends where these are equal.

    Args:
        features: (…, D), at least one vector, float: of one image (h, w, D), or of several that are to share colours.

    Raises:
        ShapeError: no vectors.
        InputError: NaN or Inf.
    """
    if features.ndim < 2 or features.size == 0:
        raise ShapeError(f"features: expected (…, D) with at least one vector, got {features.shape}")
    rows = _finite(features)  # (N, D)
    mean = rows.mean(axis=0)
    centred = rows - mean
    # The covariance is D × D however many vectors there are, and float64 leaves it twice the digits of float32.
    variances, vectors = np.linalg.eigh(centred.T @ centred / len(rows))
    floor = _FLOOR**2 * np.mean(np.sum(rows * rows, axis=1))
    axes = np.zeros((_COMPONENTS, rows.shape[1]))
    low, high = np.zeros(_COMPONENTS), np.zeros(_COMPONENTS)
    for i, k in enumerate(reversed(range(len(variances))[-_COMPONENTS:])):
        if variances[k] <= floor:
            break
        projected = centred @ vectors[:, k]  # (N,)
        sign = _side(projected) or _side(vectors[:, k]) or 1
        axes[i] = sign * vectors[:, k]
        low[i], high[i] = np.quantile(sign * projected, _RANGE)
        if low[i] == high[i]:
            low[i], high[i] = np.min(sign * projected), np.max(sign * projected)
    return PrincipalBasis(mean, axes, low, high)


def _side(values: npt.NDArray[np.float64]) -> int:
    """1 or -1: the side of 0 on which values lie further out, by their skewness about it; 0 where they are even."""
    size = np.sqrt(np.mean(values**2))
    skewness = np.mean((values / size) ** 3) if size > 0 else 0.0
    return 0 if abs(skewness) < _SYMMETRIC else int(np.sign(skewness))


def _finite(features: FloatArray) -> npt.NDArray[np.float64]:
    """(…, D) → (N, D) float64."""
    rows = features.reshape(-1, features.shape[-1]).astype(np.float64)
    if bad := np.count_nonzero(~np.isfinite(rows).all(axis=1)):
        raise InputError(f"features: expected finite numbers, got NaN or Inf in {bad} of {len(rows)} vectors")
    return rows
