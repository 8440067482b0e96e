"""One self-contained HTML file for one run or many: figures, statistics, schedules, samples, configuration.

Styles, scripts and Plotly are embedded, and the page's security policy forbids all network requests: it works
offline, and will still work when nothing it was made with is available.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from hotlap.errors import ReportError
from hotlap.files import make_directory, write_atomically, writing
from hotlap.report.analysis import RunsByLabel, analyze
from hotlap.report.figures import X_AXES, Y_AXES, build_figures
from hotlap.report.markup import swatch
from hotlap.report.sections import build_fragments

X_BUTTONS = {"step": "steps", "tokens": "tokens", "train_s": "time"}
Y_BUTTONS = {"val_loss": "validation loss", "val_bpb": "bits per byte", "loss": "training loss"}
assert X_BUTTONS.keys() == X_AXES.keys(), "every x axis needs a button"
assert Y_BUTTONS.keys() == Y_AXES.keys(), "every y axis needs a button"


def build_content(
    runs_by_label: RunsByLabel, metric: str | None = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The parts that change while a run trains: {"figures": …, "fragments": …}, ready for JSON."""
    analysis = analyze(runs_by_label, metric, notes)
    return {
        "figures": build_figures(runs_by_label, analysis),
        "fragments": build_fragments(runs_by_label, analysis),
    }


def render_page(
    runs_by_label: RunsByLabel,
    title: str,
    *,
    metric: str | None = None,
    notes: Sequence[str] = (),
    live_url: str | None = None,
) -> str:
    """The whole page. With `live_url` it polls that address on its own server for updates."""
    content = build_content(runs_by_label, metric, notes)
    figures, fragments = content["figures"], content["fragments"]
    template = Template(asset("page.html"))
    return template.substitute(
        {f"fragment_{name}": html for name, html in fragments.items()},
        title=escape(title),
        connect="'self'" if live_url else "'none'",
        live=escape(live_url or ""),
        style=asset("page.css"),
        plotly=get_plotlyjs(),
        # Without `<`, no text can close the script element that contains it.
        figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
        script=asset("page.js"),
        legend=_legend(runs_by_label),
        x_buttons=_switch("x", X_BUTTONS),
        y_buttons=_switch("y", {key: text for key, text in Y_BUTTONS.items() if key in figures["loss"]}),
        hide_target="" if figures["target"] else "hidden",
        hide_ideas="" if fragments["ideas"] else "hidden",
        hide_notes="" if fragments["notes"] or live_url else "hidden",
    )


def write_report(
    runs_by_label: RunsByLabel,
    path: Path,
    title: str,
    *,
    metric: str | None = None,
    notes: Sequence[str] = (),
) -> None:
    page = render_page(runs_by_label, title, metric=metric, notes=notes)
    write_file(path, encoded(page))


def encoded(text: str) -> bytes:
    """UTF-8, also of what it cannot encode: the bytes of a path that is no text become escapes."""
    return text.encode(errors="backslashreplace")


def write_file(path: Path, content: bytes) -> None:
    with writing(path, ReportError):
        make_directory(path.parent)
        write_atomically(path, content)


def asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _legend(runs_by_label: RunsByLabel) -> str:
    """One button per label, if there are several."""
    if len(runs_by_label) == 1:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-label="{escape(label)}">'
        f"{swatch(i)}{escape(label)}</button>"
        for i, label in enumerate(runs_by_label)
    )
    return f'<nav class="legend" aria-label="Show or hide a recipe in every figure">{buttons}</nav>'


def _switch(axis: str, buttons: dict[str, str]) -> str:
    return "".join(
        f'<button type="button" data-axis="{axis}" data-value="{key}"'
        f' aria-pressed="{"true" if i == 0 else "false"}">{text}</button>'
        for i, (key, text) in enumerate(buttons.items())
    )
