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
from hotlap.report.figures import NO_FIGURES, X_AXES, Y_AXES, build_figures
from hotlap.report.sections import FRAGMENTS, build_fragments

X_BUTTONS = {"step": "steps", "tokens": "tokens", "train_s": "time"}
Y_BUTTONS = {"val_loss": "validation loss", "val_bpb": "bits per byte", "loss": "training loss"}
assert X_BUTTONS.keys() == X_AXES.keys(), "every x axis needs a button"
assert Y_BUTTONS.keys() == Y_AXES.keys(), "every y axis needs a button"


def build_content(
    runs_by_label: RunsByLabel, metric: str | None = None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The parts that change while a run trains: {"figures": …, "fragments": …}, ready for JSON.

    Without runs, which is where the reader of a watched folder has ticked none, all are empty.
    """
    if not runs_by_label:
        nothing = dict.fromkeys(FRAGMENTS, "") | {"verdict": "<p>No run is ticked.</p>"}
        return {"figures": NO_FIGURES, "fragments": nothing}
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
    picker: str = "",
) -> str:
    """The whole page. With `live_url` it polls that address on its own server for updates.

    `picker` is the HTML of a list of runs, of which the page draws those that are ticked.
    """
    content = build_content(runs_by_label, metric, notes)
    template = Template(asset("page.html"))
    return template.substitute(
        {f"fragment_{name}": html for name, html in content["fragments"].items()},
        title=escape(title),
        connect="'self'" if live_url else "'none'",
        live=escape(live_url or ""),
        style=asset("page.css"),
        plotly=get_plotlyjs(),
        figures=embedded_json(content["figures"]),
        scripts=scripts("figures.js", "page.js", *(["live.js"] if live_url else [])),
        picker=_picker(picker) if picker else "",
        x_buttons=_switch("x", X_BUTTONS),
        y_buttons=_switch("y", Y_BUTTONS),
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


def scripts(*names: str) -> str:
    return "\n".join(f"<script>{asset(name)}</script>" for name in names)


def embedded_json(value: Any) -> str:
    """Without `<`, no text can close the script element that contains it."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def _picker(rows: str) -> str:
    return Template(asset("picker.html")).substitute(rows=rows)


def _switch(axis: str, buttons: dict[str, str]) -> str:
    return "".join(
        f'<button type="button" data-axis="{axis}" data-value="{key}"'
        f' aria-pressed="{"true" if i == 0 else "false"}">{text}</button>'
        for i, (key, text) in enumerate(buttons.items())
    )
