"""Curves over a run: means and ranges over the runs of a label, and the lines that show them.

A line carries its values exactly enough for the page's hover text: whole numbers as they are, others to nine
digits, which is what float32 holds. Curves are thinned to the resolution of a screen; points that are kept
keep their value. The page's script draws the band of a line from its `low` and `high`, and smooths all three.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotlap.runs.reader import Floats, Run

# The colors of the Okabe-Ito palette with enough contrast on white and on near-black. The dash pattern
# changes after each full round of colors.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "star", "pentagon")
MOST_STYLES = len(COLORS) * len(DASHES)
MOST_POINTS = 500

Trace = dict[str, Any]


def style_of(index: int) -> tuple[str, str, str]:
    """(color, dash, symbol) of the label at an index."""
    color, symbol = COLORS[index % len(COLORS)], SYMBOLS[index % len(SYMBOLS)]
    return color, DASHES[index // len(COLORS) % len(DASHES)], symbol


def mean_and_range(runs: Sequence[Run], x: str, y: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Grid, mean, minimum and maximum over runs, on the range of x that all runs cover.

    Beyond the end of the shortest run, the mean over the remaining runs would look like a jump in loss.
    """
    curves = [curve for curve in (_curve(run, x, y) for run in runs) if curve[0].size]
    if not curves:
        empty = np.array([], dtype=np.float64)
        return empty, empty, empty, empty
    start, end = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    grid = np.unique(np.concatenate([xs for xs, _ in curves]))
    grid = _thinned(grid[(grid >= start) & (grid <= end)])
    values = np.array([np.interp(grid, xs, ys) for xs, ys in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _curve(run: Run, x: str, y: str) -> tuple[Floats, Floats]:
    table = run.validation if y.startswith("val_") else run.train
    known = np.isfinite(table[y])
    return table[x][known], table[y][known]


def _thinned(values: Floats) -> Floats:
    if values.size <= MOST_POINTS:
        return values
    kept: Floats = values[np.linspace(0, values.size - 1, MOST_POINTS).round().astype(int)]
    return kept


def exact(values: Floats) -> list[float]:
    """Plain numbers. They make up most of a report's size beside Plotly."""
    return [int(value) if value.is_integer() else float(f"{value:.9g}") for value in values.tolist()]


def line(label: str, color: str, dash: str, xs: Floats, ys: Floats, *, name: str, width: float) -> Trace:
    """The name is escaped: Plotly interprets markup. The page's legend looks for the label in `meta`."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if xs.size == 1 else "lines",
        "name": html.escape(name),
        "meta": label,
        "x": exact(xs),
        "y": exact(ys),
        "line": {"color": color, "dash": dash, "width": width},
    }


def with_range(trace: Trace, low: Floats, high: Floats) -> Trace:
    return {**trace, "low": exact(low), "high": exact(high)}
