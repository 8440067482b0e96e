"""The loss figure as a PNG, for example for a README. Drawn with matplotlib (https://matplotlib.org), which
the `png` extra installs.

It shows the same as the page's first figure over training time: mean and range of each label, and the target,
below its title the size and hardware.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from hotlap.errors import ReportError
from hotlap.report.analysis import RunsByLabel, analyze
from hotlap.report.curves import mean_and_range, style_of
from hotlap.report.figures import X_AXES, Y_AXES, focused_range
from hotlap.report.lead import described_setting
from hotlap.report.page import write_file

LINESTYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def write_picture(runs_by_label: RunsByLabel, path: Path, title: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ReportError(
            expected="matplotlib, to write a PNG",
            found="no such package",
            do="install it with `pip install matplotlib`",
        ) from None
    analysis = analyze(runs_by_label)
    if analysis.target:
        y = analysis.target.field
    else:
        y = "val_bpb" if analysis.metric.key == "bpb" else "val_loss"
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    _draw_curves(axes, runs_by_label, y, analysis.target.value if analysis.target else None)
    if analysis.target:
        axes.axhline(analysis.target.value, color="0.4", linewidth=1, linestyle="--", label="target")
    axes.set_title(_plain(title), loc="left", fontweight="bold", pad=20)
    axes.annotate(
        _plain(described_setting(runs_by_label)),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=8,
        color="0.4",
    )
    axes.set_xlabel(X_AXES["train_s"])
    axes.set_ylabel(Y_AXES[y])
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    buffer = io.BytesIO()
    # Without metadata such as the software version, the same runs give a byte-identical file.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    write_file(path, buffer.getvalue())


def _draw_curves(axes: Any, runs_by_label: RunsByLabel, y: str, target_value: float | None) -> None:
    ranges = []
    for index, (label, runs) in enumerate(runs_by_label.items()):
        color, dash, _ = style_of(index)
        grid, mean, low, high = mean_and_range(runs, "train_s", y)
        axes.plot(grid, mean, color=color, linestyle=LINESTYLES[dash], label=_plain(label))
        axes.fill_between(grid, low, high, color=color, alpha=0.18, linewidth=0)
        ranges.append((grid, low, high))
    focus = focused_range(ranges, target_value)
    if focus:
        axes.set_ylim(*focus)


def _plain(text: str) -> str:
    """Escape dollar signs, which would start a formula."""
    return text.replace("$", r"\$")
