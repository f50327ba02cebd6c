"""How a cost grows with what causes it: points measured in turns, a fit with a meaning, and its knee.

Three laws, by what is varied:

- `linear`, for image size, objects and batch: fixed + slope · x. The knee is where the part that grows has become as
  large as the fixed one.
- `shared`, for threads: serial + parallel / x (Amdahl, "Validity of the single processor approach", 1967). The knee is
  where one more saves less than a tenth of the time.
- `saturating`, for images at once: nothing is fitted; the knee is the fewest that give 95 % of the highest rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.bench.plots import COLOURS, INK, MUTED, canvas, decimals
from visionfast.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "Fit", "Law", "fit", "knee"]

Law: TypeAlias = Literal["linear", "shared", "saturating"]

_NEAR_FULL = 0.95
_SMALL_GAIN = 0.10
_NO_LAW = 0.25  # deviation of a point, from which the points do not follow the law


@dataclass(frozen=True, slots=True)
class Fit:
    """y = `fixed` + `slope` · x of a `linear` law, `fixed` + `slope` / x of a `shared` one.

    Attributes:
        fixed, slope: at least 0, in units of y (and of x).
        error: the largest deviation of a point, as a share of its y.
    """

    fixed: float
    slope: float
    error: float


def fit(law: Law, x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Least squares of the relative deviations; neither part is negative. `None` with fewer than two different x, and
    where the law has no formula.

    Args:
        law: of y.
        x: above 0, or at least 0 for `linear`.
        y: above 0.

    Raises:
        OptionError: x and y are not as many, or out of their range.
    """
    where, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    least = 0.0 if law == "linear" else np.nextafter(0.0, 1.0)
    usable = where.shape == values.shape and np.isfinite(where).all() and (where >= least).all()
    if not (usable and np.isfinite(values).all() and (values > 0).all()):
        raise OptionError(f"fit: expected as many finite x as y, all positive, got {list(x)} and {list(y)}")
    if law == "saturating" or len(np.unique(where)) < 2:
        return None
    grows = where if law == "linear" else 1 / where
    candidates = []
    for columns in ((np.ones_like(where), grows), (np.ones_like(where), None), (None, grows)):
        there = [column for column in columns if column is not None]
        solved = iter(np.linalg.lstsq(np.stack([c / values for c in there], 1), np.ones_like(values), rcond=None)[0])
        fixed, slope = (0.0 if column is None else float(next(solved)) for column in columns)
        if fixed >= 0 and slope >= 0:
            deviations = np.abs(fixed + slope * grows - values) / values
            candidates.append((float(np.square(deviations).sum()), Fit(fixed, slope, float(deviations.max()))))
    return min(candidates, key=lambda one: one[0])[1]  # the constant is always among them


def knee(law: Law, x: Sequence[float], y: Sequence[float]) -> float | None:
    """Where the curve bends, in units of x; `None` where it does not within the points. Arguments as for `fit`."""
    where, values = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if law == "saturating":
        enough = where[values >= _NEAR_FULL * values.max()] if len(values) else where
        return float(enough.min()) if len(enough) else None
    found = fit(law, x, y)
    if found is None or found.slope == 0:
        return None
    if law == "linear":
        at = found.fixed / found.slope
    else:
        # serial + parallel / x: from x to x + 1 the time falls by parallel / (x (x + 1)).
        at = next(
            (
                float(n)
                for n in range(1, math.ceil(where.max()) + 1)
                if found.slope / (n * (n + 1)) < _SMALL_GAIN * (found.fixed + found.slope / n)
            ),
            math.inf,
        )
    return at if where.min() <= at <= where.max() else None


@dataclass(frozen=True, slots=True)
class Curve:
    """What was measured of one cause.

    Attributes:
        name: of the cause, for people: `image size`.
        x_unit: of x: `megapixels`, `threads`.
        y_unit: of y: `ms an image`, `images/s`.
        law: of y.
        x: one for each point, ascending.
        y: each point's values, one a round.
    """

    name: str
    x_unit: str
    y_unit: str
    law: Law
    x: tuple[float, ...]
    y: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> npt.NDArray[np.float64]:
        """(P,) in units of y."""
        return np.array([np.median(values) for values in self.y], np.float64)

    @property
    def fit(self) -> Fit | None:
        return fit(self.law, self.x, [float(value) for value in self.medians])

    @property
    def follows(self) -> bool:
        """Whether the points follow the law that was fitted; for what has no formula, always."""
        found = self.fit
        return found is None or found.error <= _NO_LAW

    @property
    def knee(self) -> float | None:
        if not self.follows:
            return None
        return knee(self.law, self.x, [float(value) for value in self.medians])

    @property
    def in_words(self) -> str:
        """What the curve says, in a sentence or two."""
        found, bend = self.fit, self.knee
        unit = self.y_unit.split(" ")[0]
        one = self.x_unit.removesuffix("s")
        words = ""
        if found is not None and not self.follows:
            return f"The points do not follow its law: they are up to {found.error:.0%} off. Measure again, in quiet."
        if found is not None and self.law == "linear":
            words = f"{decimals(found.fixed)} {unit} fixed + {decimals(found.slope)} {unit} for each {one}"
        elif found is not None:
            words = f"{decimals(found.fixed)} {unit} that more {self.x_unit} do not shorten"
            words += f" + {decimals(found.slope)} {unit} that they share"
        if found is not None:
            words += f" (points within {found.error:.0%} of it). "
        if self.law == "saturating":
            if bend is None:
                return words
            return f"Most of the highest rate is there with {bend:g} {self.x_unit if bend != 1 else one}."
        if bend is None:
            return words + "No knee within what was measured."
        if self.law == "linear":
            return words + f"Knee at {bend:.3g} {self.x_unit}: from there on, what grows costs more than what is fixed."
        return words + f"Knee at {bend:g} {self.x_unit if bend != 1 else one}: one more saves less than a tenth."

    def figure(self) -> Figure:
        """The points with their spread (5 to 95 %), the fit and the knee."""
        with canvas(3.1, 6.4) as (figure, axes):
            spread = np.array([np.percentile(values, (5, 95)) for values in self.y])  # (P, 2)
            medians = self.medians
            bars = np.stack([medians - spread[:, 0], spread[:, 1] - medians]).clip(min=0)
            axes.errorbar(self.x, medians, bars, fmt="o", color=COLOURS[0], ms=5, capsize=2.5, lw=1.2, zorder=3)
            if (found := self.fit) is not None and self.follows:
                line = np.linspace(min(self.x), max(self.x), 200)
                grows = line if self.law == "linear" else 1 / line
                axes.plot(line, found.fixed + found.slope * grows, color=COLOURS[1], lw=1.6, zorder=2)
            else:
                axes.plot(self.x, medians, color=COLOURS[1], lw=1.6, zorder=2)
            if (bend := self.knee) is not None:
                axes.axvline(bend, color=COLOURS[5], ls="--", lw=1.2)
                right = bend > (min(self.x) + max(self.x)) / 2
                axes.annotate(
                    f"knee: {bend:.3g}",
                    (bend, 0.04),
                    xytext=(-5 if right else 5, 0),
                    textcoords="offset points",
                    xycoords=("data", "axes fraction"),
                    ha="right" if right else "left",
                    color=INK,
                    fontsize=8.5,
                )
            axes.set_ylim(0, float(spread.max()) * 1.12)
            axes.set_xlabel(self.x_unit)
            axes.set_ylabel(self.y_unit)
            if all(float(value).is_integer() for value in self.x):
                axes.set_xticks(self.x if len(self.x) <= 10 else self.x[::2])
            axes.grid(color=MUTED, alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
        return figure
