"""The page's figures as plain dictionaries for Plotly (https://plotly.com/javascript/), without importing it.

Data and axes are set here, fonts and grid colors in the page. Every trace has its label in `meta`; the page's
legend uses it to hide and show a label in all figures. Plotly interprets markup in text, so names are escaped
here. Curves are downsampled to the resolution of a screen.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hotlap.json_files import finite
from hotlap.report.analysis import Analysis, RunsByLabel, Target
from hotlap.runs.reader import Floats, Run

# The colors of the Okabe-Ito palette with enough contrast on white and on near-black. The dash pattern
# changes after each full round of colors.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "star", "pentagon")
MOST_POINTS = 300
SMOOTHING_FRACTION = 0.02  # training loss is averaged over this fraction of the run's steps

X_AXES = {"step": "steps", "tokens": "training tokens", "train_s": "training time in seconds"}
Y_AXES = {"val_loss": "validation loss in nats", "val_bpb": "bits per byte", "loss": "training loss in nats"}
PLAIN = {
    "window": "attention window in tokens",
    "lr": "learning rate multiplier",
    "momentum": "Muon momentum",
    "tokens_per_s": "tokens per second",
    "memory_mib": "peak memory in MiB",
}

Figure = dict[str, Any]


def build_figures(runs_by_label: RunsByLabel, analysis: Analysis) -> dict[str, Any]:
    """`loss` (a figure per y and x axis), `target` (or None), and a figure per schedule or rate."""
    has_bpb = any(
        np.isfinite(run.validation["val_bpb"]).any() for runs in runs_by_label.values() for run in runs
    )
    figures: dict[str, Any] = {
        "loss": {
            y: {x: _loss_figure(runs_by_label, x, y, analysis.target) for x in X_AXES}
            for y in Y_AXES
            if y != "val_bpb" or has_bpb
        },
        "target": _target_figure(runs_by_label, analysis) if analysis.target else None,
    }
    for field in PLAIN:
        # A schedule is the same for every seed, so only the first run is drawn. Rates are averaged.
        is_schedule = field in ("window", "lr", "momentum")
        shown = {label: runs[:1] if is_schedule else runs for label, runs in runs_by_label.items()}
        figures[field] = _plain_figure(shown, field)
    checked: dict[str, Any] = finite(figures)
    return checked


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
    xs, ys = table[x][known], table[y][known]
    if y == "loss" and ys.size:
        width = max(1, round(SMOOTHING_FRACTION * ys.size))
        sums = np.cumsum(np.concatenate([[0.0], ys]))
        first = np.maximum(np.arange(1, ys.size + 1) - width, 0)
        ys = (sums[1:] - sums[first]) / (np.arange(1, ys.size + 1) - first)
    return xs, ys


def _thinned(values: Floats) -> Floats:
    if values.size <= MOST_POINTS:
        return values
    kept: Floats = values[np.linspace(0, values.size - 1, MOST_POINTS).round().astype(int)]
    return kept


def _rounded(values: Floats) -> list[float]:
    """Six significant digits. These numbers make up most of a report's size."""
    return [float(f"{value:.6g}") for value in values]


def _loss_figure(runs_by_label: RunsByLabel, x: str, y: str, target: Target | None) -> Figure:
    traces: list[dict[str, Any]] = []
    ranges: list[tuple[Floats, Floats, Floats]] = []
    for index, (label, runs) in enumerate(runs_by_label.items()):
        color, dash, _ = style_of(index)
        grid, mean, low, high = mean_and_range(runs, x, y)
        if len(runs) > 1:
            traces.append(_band(label, color, grid, low, high))
        if len(runs_by_label) == 1 and y != "loss":
            xs, trained, _, _ = mean_and_range(runs, x, "loss")
            trained = trained * _per_nat(runs, y)
            traces.append(_line(label, color, "dot", xs, trained, name="training", width=1.5))
            ranges.append((xs, trained, trained))
        traces.append(_line(label, color, dash, grid, mean, name=label, width=2.5))
        ranges.append((grid, low, high))
        if len(runs) == 1 and y != "loss":
            traces += _best_marker(label, color, runs[0], x, y)
    layout: dict[str, Any] = {"xaxis": _axis(X_AXES[x]), "yaxis": _axis(Y_AXES[y])}
    layout["xaxis"]["uirevision"], layout["yaxis"]["uirevision"] = x, y
    has_target_line = target is not None and target.field == y
    if target and has_target_line:
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target.value, "y1": target.value}
            | {"line": {"dash": "dash", "width": 1}}
        ]
        layout["annotations"] = [
            {"text": "target", "xref": "paper", "x": 1, "y": target.value, "showarrow": False}
            | {"xanchor": "right", "yanchor": "bottom"}
        ]
    focus = focused_range(ranges, target.value if target and has_target_line else None)
    if focus:
        layout["yaxis"]["range"] = focus
    return {"data": traces, "layout": layout}


def _per_nat(runs: Sequence[Run], y: str) -> float:
    """Factor from nats per token to the unit of y: bits per byte at the bytes per token of validation."""
    if y != "val_bpb":
        return 1.0
    pairs = [run.validation["val_bpb"] / run.validation["val_loss"] for run in runs]
    known = np.concatenate(pairs)
    return float(np.nanmean(known)) if np.isfinite(known).any() else float("nan")


def _best_marker(label: str, color: str, run: Run, x: str, y: str) -> list[dict[str, Any]]:
    """A star at the best validation; nothing if there is none, or if it is the last."""
    best = run.best
    if best is None or best == run.validation["step"].size - 1:
        return []
    step = run.validation["step"][best]
    return [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "best",
            "meta": label,
            "x": _rounded(run.validation[x][best : best + 1]),
            "y": _rounded(run.validation[y][best : best + 1]),
            "text": [f"best, step {step:.0f}"],
            "textposition": "top right",
            "marker": {"color": color, "symbol": "star", "size": 13},
        }
    ]


def focused_range(
    ranges: Sequence[tuple[Floats, Floats, Floats]], target_value: float | None
) -> list[float] | None:
    """Limits of the y axis, without the first tenth of the run, where the loss falls too steeply to show.

    `ranges` holds (grid, minimum, maximum) per label. Returns None if there are too few points.
    """
    long_enough = [(grid, low, high) for grid, low, high in ranges if grid.size >= 5]
    if not long_enough:
        return None
    top = max(
        float(np.interp(grid[0] + (grid[-1] - grid[0]) / 10, grid, high)) for grid, _, high in long_enough
    )
    bottom = min(float(low.min()) for _, low, _ in long_enough)
    if target_value is not None:
        bottom = min(bottom, target_value)
    margin = 0.05 * (top - bottom)
    return [bottom - margin, top + margin]


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True}


def _line(
    label: str, color: str, dash: str, xs: Floats, ys: Floats, *, name: str, width: float
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if xs.size == 1 else "lines",
        "name": html.escape(name),
        "meta": label,
        "x": _rounded(xs),
        "y": _rounded(ys),
        "line": {"color": color, "dash": dash, "width": width},
    }


def _band(label: str, color: str, xs: Floats, low: Floats, high: Floats) -> dict[str, Any]:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": html.escape(f"{label}, min to max"),
        "meta": label,
        "x": _rounded(np.concatenate([xs, xs[::-1]])),
        "y": _rounded(np.concatenate([high, low[::-1]])),
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.18)",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }


def _target_figure(runs_by_label: RunsByLabel, analysis: Analysis) -> Figure:
    """One marker per run: filled if the target was reached, open if the run ended without reaching it."""
    traces = []
    for index, (row, runs) in enumerate(zip(analysis.rows, runs_by_label.values(), strict=True)):
        color, _, symbol = style_of(index)
        waits = row.waits["train_s"]
        seconds = np.where(waits.reached, waits.until, [run.train_s for run in runs])
        # Offset the runs of a label vertically, so that equal times do not hide each other.
        offsets = np.linspace(-0.25, 0.25, waits.count) if waits.count > 1 else np.zeros(1)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": html.escape(row.label),
                "meta": row.label,
                "x": _rounded(seconds),
                "y": _rounded(index + offsets),
                "text": [
                    html.escape(f"{run.name}, seed {run.config.seed}: ")
                    + (f"reached after {after:,.1f} s" if reached else f"not reached in {after:,.1f} s")
                    for run, after, reached in zip(runs, seconds, waits.reached, strict=True)
                ],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {
                    "color": color,
                    "size": 11,
                    "line": {"color": color, "width": 2},
                    "symbol": [symbol if reached else "triangle-right-open" for reached in waits.reached],
                },
            }
        )
    layout = {
        "xaxis": _axis("training seconds") | {"rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(runs_by_label))),
            "ticktext": [html.escape(label) for label in runs_by_label],
            "range": [len(runs_by_label) - 0.5, -0.5],
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
        },
    }
    return {"data": traces, "layout": layout}


def _plain_figure(runs_by_label: Mapping[str, Sequence[Run]], field: str) -> Figure:
    traces = []
    for index, (label, runs) in enumerate(runs_by_label.items()):
        color, dash, _ = style_of(index)
        grid, mean, _, _ = mean_and_range(runs, "step", field)
        traces.append(_line(label, color, dash, grid, mean, name=label, width=2))
    layout = {"xaxis": _axis("steps"), "yaxis": _axis(PLAIN[field]) | {"rangemode": "tozero"}}
    return {"data": traces, "layout": layout}
