"""Curves as SVG markup that stands inside a page."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from pennyclip.reporting.markup import Html

COLOURS = ("#0b6e8f", "#d1603d", "#4c8c4a", "#8a5a9e", "#b8901f", "#5f6b76")
"""Chosen: apart for the colour-blind, and in grey print by their order."""
BINS = 300  # chosen: about two pixels a bin on the page
BARS = 60  # of a histogram. chosen: as many as can be told apart
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: sharp, selectable, in the page's own font
    "svg.hashsalt": "pennyclip",  # the same run, the same bytes
    "font.family": "DejaVu Sans",  # comes with matplotlib; measures the text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#9aa5ae",
    "axes.labelcolor": "#55616b",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6eaed",
    "grid.linewidth": 0.8,
    "xtick.color": "#55616b",
    "ytick.color": "#55616b",
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.labelcolor": "#55616b",
    "xtick.major.size": 3,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


@dataclass(frozen=True)
class Series:
    """One curve: values over update steps. Values that are not finite are left out."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0
    """Position in COLOURS."""
    line: Literal["solid", "dashed", "dotted"] = "solid"


def chart(
    series: Sequence[Series],
    unit: str,
    *,
    percent: bool = False,
    log: bool = False,
    level: tuple[float, str] | None = None,
    mark: tuple[int | Sequence[int], str] | None = None,
    points: bool = False,
) -> Html:
    """Draw curves over one axis of steps.

    Args:
        unit: what the vertical axis shows.
        percent: values are shares of 1 and are labelled in per cent.
        log: the vertical axis is logarithmic; values of zero and below are left out.
        level: a horizontal line (chance, a limit) with its name.
        mark: a step to point out, or several, with their name.
        points: each value is a dot, for few and far between measurements.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 2.9), layout="constrained")
        axis = figure.subplots()
        for curve in series:
            _draw(axis, curve, log, points)
        if level:
            axis.axhline(level[0], color="#7c8790", linewidth=1.1, dashes=(5, 3), label=level[1])
        if mark:
            steps = [mark[0]] if isinstance(mark[0], int) else mark[0]
            for step, label in zip(steps, [mark[1], *[None] * len(steps)], strict=False):
                axis.axvline(step, color="#7c8790", linewidth=1.1, dashes=(1, 2), label=label)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            low, high = axis.get_ylim()
            axis.set_ylim(bottom=0 if low > 0 or percent else low, top=high)
        if percent:
            axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axis.set_xlabel("step")
        axis.set_ylabel(unit)
        if len(series) > 1 or level or mark:
            figure.legend(loc="outside upper left", ncols=3, handlelength=2.2, columnspacing=1.4)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(buffer.getvalue())


def histogram(
    values: npt.ArrayLike, unit: str, what: str, mark: tuple[float, str] | None = None
) -> Html:
    """Draw how often values occur, over equal intervals from the smallest to the largest.

    Args:
        unit: what the horizontal axis shows.
        what: what is counted, for the vertical axis.
        mark: a value to point out with its name.
    """
    values = np.asarray(values, float)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 2.9), layout="constrained")
        axis = figure.subplots()
        axis.hist(values, bins=BARS, color=COLOURS[0], alpha=0.75)
        if mark:
            axis.axvline(mark[0], color=COLOURS[1], linewidth=1.4, label=mark[1])
            figure.legend(loc="outside upper left", handlelength=1.6)
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        axis.set_xlabel(unit)
        axis.set_ylabel(what)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(buffer.getvalue())


def heat_map(rows: Mapping[str, Sequence[float]], steps: Sequence[int], unit: str) -> Html:
    """Draw values of many rows over steps as colours, on a logarithmic scale.

    Args:
        rows: by name, from the top; at least one. What is not above 0 and finite is a gap.
        steps: of the columns.
        unit: what the colours show.
    """
    values = np.array(list(rows.values()), float)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values)
    logs[~np.isfinite(logs)] = np.nan
    edges = np.asarray(steps, float)
    if len(steps) > BINS:  # the largest in each: a jump shall show
        pieces = np.array_split(np.arange(len(steps)), BINS)
        logs = np.stack([np.fmax.reduce(logs[:, piece], axis=1) for piece in pieces], axis=1)
        edges = np.array([edges[piece].mean() for piece in pieces])
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(5.4, 0.9 + 0.16 * max(8, len(rows))), layout="constrained")
        axis = figure.subplots()
        if np.isnan(logs).all():
            logs = np.zeros_like(logs)
        drawn = axis.imshow(
            logs,
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            extent=(edges[0] - 0.5, edges[-1] + 0.5, len(rows) - 0.5, -0.5),
        )
        axis.set_yticks(range(len(rows)), list(rows), fontsize=7)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 2.5, 5, 10]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axis.set_xlabel("step")
        bar = figure.colorbar(drawn, ax=axis, label=unit, shrink=0.8)
        bar.outline.set_visible(False)
        bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=5))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{10**y:.2g}"))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _inline(buffer.getvalue())


def _draw(axis: Any, curve: Series, log: bool, points: bool) -> None:
    steps, values = np.asarray(curve.steps, float), np.asarray(curve.values, float)
    kept = np.isfinite(values) & ((values > 0) | (not log))
    steps, values = steps[kept], values[kept]
    colour = COLOURS[curve.colour % len(COLOURS)]
    if len(values) > 2 * BINS:
        pieces = np.array_split(np.arange(len(values)), BINS)
        low, high = ([pick(values[p]) for p in pieces] for pick in (np.min, np.max))
        steps, values = (np.array([array[p].mean() for p in pieces]) for array in (steps, values))
        axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    dot = "o" if (points and curve.line == "solid") or len(values) == 1 else None
    axis.plot(
        steps,
        values,
        color=colour,
        linestyle=curve.line,
        marker=dot,
        markersize=3.5,
        label=curve.name,
    )


def _inline(svg: str) -> Html:
    """Only the element: a page needs no prolog, no metadata, and each id at most once."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[^"]*_[^"]*"', "", svg)  # matplotlib's counters; references have none
    svg = re.sub(r' width="[^"]*pt"', "", re.sub(r' height="[^"]*pt"', "", svg, count=1), count=1)
    return Html(svg)


def spread(values: Sequence[float]) -> float:
    """Largest over smallest of the positive, finite values; 1 where there are none."""
    good = [value for value in values if math.isfinite(value) and value > 0]
    return max(good) / min(good) if good else 1.0
