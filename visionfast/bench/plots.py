"""The report's pictures, drawn by matplotlib: one drawing for the page (SVG that takes the page's ink, light or dark)
and for files (PNG).

Colours are Okabe and Ito's, which colour-blind people tell apart (Color Universal Design, 2008); nothing is told by
colour alone.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from visionfast.errors import BackendUnavailableError
from visionfast.terminal import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "INK", "MUTED", "canvas", "decimals", "number_of_rows", "png", "rows", "svg"]

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
INK, MUTED = "#101214", "#6b7075"
"""Of text and of lines; in SVG they become the page's own."""

_PNG_DPI = 160
_ROW_INCHES = 0.42


@contextlib.contextmanager
def _style() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise BackendUnavailableError(
            f"plots: expected matplotlib, but {error}; `pip install 'visionfast[bench]'`"
        ) from error
    settings: Any = {
        "font.size": 9.5,
        "text.parse_math": False,  # a `$` in a file's name is a `$`
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "axes.titlesize": 10.5,
        "xtick.color": MUTED,
        "ytick.color": INK,
        "svg.fonttype": "none",
        "svg.hashsalt": "visionfast",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A name may be in any script; the page's own fonts have what matplotlib's has not.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from")
        yield


@contextlib.contextmanager
def canvas(height_inches: float, width_inches: float = 9.0) -> Iterator[tuple[Figure, Axes]]:
    """A figure with one pair of axes, and matplotlib's settings while it is drawn on.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
        yield figure, figure.add_subplot()


def number_of_rows(count: int) -> float:
    """Inches that a figure with so many named rows is high."""
    return 0.95 + _ROW_INCHES * count


def rows(axes: Axes, names: Sequence[str]) -> None:
    """Names the rows of a horizontal chart, the first at the top."""
    axes.set_yticks(range(len(names)), [_shortened(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=MUTED, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _shortened(name: str, most: int = 52) -> str:
    name = one_line(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def decimals(ms: float) -> str:
    """A time with three digits that mean something: `0.42`, `8.31`, `42.0`, `692`."""
    size = abs(ms)
    return f"{ms:.0f}" if size >= 99.95 else f"{ms:.1f}" if size >= 9.995 else f"{ms:.2f}"


def png(figure: Figure) -> bytes:
    """The figure on white, for a file."""
    out = io.BytesIO()
    with _style():
        figure.savefig(out, format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def svg(figure: Figure, label: str, prefix: str) -> str:
    """The figure as an `<svg>` element that refers to nothing outside itself, and takes the page's ink.

    Args:
        figure: of `canvas`.
        label: what it shows, in words, for those who do not see it; escaped here.
        prefix: letters and digits that no other figure of the page has, in front of its ids.
    """
    out = io.StringIO()
    with _style():
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = (
        re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", text.split(">", 1)[0])
        + ">"
        + text.split(">", 1)[1]
    )
    text = text.replace(INK, "currentColor").replace(MUTED, "var(--muted)")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:)?href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(one_line(label))}"', 1)
