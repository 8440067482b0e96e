"""The page's figures as plain dictionaries for Plotly (https://plotly.com/javascript/), without importing it.

Data and axes are set here, fonts and grid colors in the page. Every trace has its label in `meta`; the page's
legend uses it to hide and show a label in all figures. Plotly interprets markup in text, so names are escaped
here.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hotlap.json_files import finite
from hotlap.report.analysis import Analysis, RunsByLabel, Target
from hotlap.report.curves import Trace, exact, line, mean_and_range, style_of, with_range
from hotlap.runs.reader import Floats, Run

X_AXES = {"step": "steps", "tokens": "training tokens", "train_s": "training time in seconds"}
X_FORMATS = {"step": ",d", "tokens": ",d", "train_s": ",.3~f"}  # of d3, for the hover text
Y_AXES = {"val_loss": "validation loss in nats", "val_bpb": "bits per byte", "loss": "training loss in nats"}
# Each a figure over the same x axis as the loss.
SCHEDULES = {
    "lr": "learning rate multiplier",
    "momentum": "Muon momentum",
    "window": "attention window in tokens",
}
RATES = {
    "tokens_per_s": "tokens per second",
    "memory_mib": "peak memory in MiB",
    "grad_norm": "gradient norm",
}
PANELS = {**SCHEDULES, **RATES}

NO_FIGURES: dict[str, Any] = {"loss": None, "panels": dict.fromkeys(PANELS), "target": None}

Figure = dict[str, Any]


def build_figures(runs_by_label: RunsByLabel, analysis: Analysis) -> dict[str, Any]:
    """`loss` (a figure per y and x axis), `panels` (each a figure per x axis, or None without data), `target`
    (or None).
    """
    has_bpb = any(
        np.isfinite(run.validation["val_bpb"]).any() for runs in runs_by_label.values() for run in runs
    )
    figures: dict[str, Any] = {
        "loss": {
            y: {x: _loss_figure(runs_by_label, x, y, analysis.target) for x in X_AXES}
            for y in Y_AXES
            if y != "val_bpb" or has_bpb
        },
        "panels": {field: _panel(runs_by_label, field) for field in PANELS},
        "target": _target_figure(runs_by_label, analysis) if analysis.target else None,
    }
    checked: dict[str, Any] = finite(figures)
    return checked


def _loss_figure(runs_by_label: RunsByLabel, x: str, y: str, target: Target | None) -> Figure:
    traces: list[Trace] = []
    ranges: list[tuple[Floats, Floats, Floats]] = []
    for index, (label, runs) in enumerate(runs_by_label.items()):
        color, dash, _ = style_of(index)
        grid, mean, low, high = mean_and_range(runs, x, y)
        if len(runs_by_label) == 1 and y != "loss":
            xs, trained, _, _ = mean_and_range(runs, x, "loss")
            trained = trained * _per_nat(runs, y)
            traces.append(line(label, color, "dot", xs, trained, name="training", width=1))
            ranges.append((xs, trained, trained))
        curve = line(label, color, dash, grid, mean, name=label, width=2.5)
        traces.append(with_range(curve, low, high) if len(runs) > 1 else curve)
        ranges.append((grid, low, high))
        if len(runs) == 1 and y != "loss":
            traces += _best_marker(label, color, runs[0], x, y)
    layout: dict[str, Any] = {"xaxis": _x_axis(x), "yaxis": _axis(Y_AXES[y])}
    has_target_line = target is not None and target.field == y
    if target and has_target_line:
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target.value, "y1": target.value}
            | {"line": {"dash": "dash", "width": 1}}
        ]
        layout["annotations"] = [
            {"text": "target", "xref": "paper", "x": 0, "y": target.value, "showarrow": False}
            | {"xanchor": "left", "yanchor": "bottom"}  # where the curves are far above it
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


def _best_marker(label: str, color: str, run: Run, x: str, y: str) -> list[Trace]:
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
            "x": exact(run.validation[x][best : best + 1]),
            "y": exact(run.validation[y][best : best + 1]),
            "text": [f"best, step {step:.0f}"],
            "textposition": "top right",
            "marker": {"color": color, "symbol": "star", "size": 13},
        }
    ]


def focused_range(
    ranges: Sequence[tuple[Floats, Floats, Floats]], target_value: float | None
) -> list[float] | None:
    """Limits of the y axis, without the first tenth of the run, where the loss falls too steeply to show.

    What rises later, as validation does when a text is learned by heart, is inside. `ranges` holds (grid,
    minimum, maximum) per label. Returns None if there are too few points.
    """
    long_enough = [(grid, low, high) for grid, low, high in ranges if grid.size >= 5]
    if not long_enough:
        return None
    top = max(max(_about_a_tenth(grid, high), _later(grid, high)) for grid, _, high in long_enough)
    bottom = min(float(low.min()) for _, low, _ in long_enough)
    if target_value is not None:
        bottom = min(bottom, target_value)
    margin = 0.05 * (top - bottom)
    return [bottom - margin, top + margin]


def _about_a_tenth(grid: Floats, values: Floats) -> float:
    """The value after a tenth of the grid, by the median around it: a spike of the loss hides nothing."""
    part = (grid - grid[0]) / (grid[-1] - grid[0])
    around = values[(part >= 0.05) & (part <= 0.15)]
    return float(np.median(around)) if around.size else float(np.interp(0.1, part, values))


def _later(grid: Floats, values: Floats) -> float:
    """The largest value after a tenth of the grid, but for spikes: the median of it and its neighbors."""
    later = np.pad(values[grid - grid[0] >= 0.1 * (grid[-1] - grid[0])], (0, 1), mode="edge")
    return float(np.median(sliding_window_view(later, min(3, later.size)), axis=-1).max())


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True}


def _x_axis(x: str) -> dict[str, Any]:
    return _axis(X_AXES[x]) | {"hoverformat": X_FORMATS[x]}


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
                "x": exact(seconds),
                "y": exact(index + offsets),
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


def _panel(runs_by_label: RunsByLabel, field: str) -> dict[str, Figure] | None:
    """A figure per x axis; None if no run has recorded the field."""
    # A schedule is the same for every seed, so only the first run is drawn. Rates are averaged.
    shown = {label: runs[:1] if field in SCHEDULES else runs for label, runs in runs_by_label.items()}
    if not any(np.isfinite(run.train[field]).any() for runs in shown.values() for run in runs):
        return None
    return {x: _panel_figure(shown, x, field) for x in X_AXES}


def _panel_figure(runs_by_label: RunsByLabel, x: str, field: str) -> Figure:
    traces = []
    for index, (label, runs) in enumerate(runs_by_label.items()):
        color, dash, _ = style_of(index)
        grid, mean, _, _ = mean_and_range(runs, x, field)
        traces.append(line(label, color, dash, grid, mean, name=label, width=2))
    layout = {"xaxis": _x_axis(x), "yaxis": _axis(PANELS[field]) | {"rangemode": "tozero"}}
    return {"data": traces, "layout": layout}
