"""The ledger as a table for the terminal and as a page: what was tried, what helped, at what cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from hotlap.lab.decision import Outcome
from hotlap.lab.ledger import Entry, Try
from hotlap.report.analysis import METRICS
from hotlap.report.figures import Figure
from hotlap.report.markup import Cell, facts_list, number, sortable_table
from hotlap.report.sheet import Section, write_sheet

# Of the Okabe-Ito palette, with a symbol of its own for each outcome: color is not the only difference.
LOOKS = {
    Outcome.HELPS: ("#009E73", "circle"),
    Outcome.NO_EFFECT: ("#0072B2", "circle-open"),
    Outcome.HURTS: ("#D55E00", "x"),
    Outcome.UNDECIDED: ("#E69F00", "diamond-open"),
}
UNKNOWN = "–"


def headers() -> list[str]:
    return ["try", "idea", "against", "size", "outcome", "effect", "p", "level", "rounds", "time"]


def rows(tries: Sequence[Try]) -> list[list[str]]:
    """One row per try, as text."""
    return [
        [
            str(one.began["number"]),
            str(one.began["idea"]["label"]),
            str(one.began["parent"]),
            str(one.began["size"]),
            one.outcome,
            effect_text(one.verdict),
            _p_text(one.verdict),
            f"{one.began['level']:.2g}",
            f"{one.verdict['rounds']} of {one.began['most_seeds']}" if one.verdict else UNKNOWN,
            _time_text(one.verdict["seconds"]) if one.verdict else UNKNOWN,
        ]
        for one in tries
    ]


def effect_text(verdict: Entry | None) -> str:
    if verdict is None or verdict["effect"] is None:
        return UNKNOWN
    metric = METRICS[verdict["metric"]]
    text = f"{metric.format(verdict['effect'], signed=True)} {metric.unit}"
    if verdict["low"] is not None:
        low, high = (metric.format(verdict[name], signed=True) for name in ("low", "high"))
        text += f" ({low} to {high})"
    return text


def _p_text(verdict: Entry | None) -> str:
    return UNKNOWN if verdict is None or verdict["p"] is None else f"{verdict['p']:.2g}"


def _time_text(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    return f"{seconds:,.1f} s" if seconds < 600 else f"{seconds / 60:,.0f} min"


def cumulated(tries: Sequence[Try]) -> dict[tuple[str, str], float]:
    """{(size, unit): sum of the gains of what helped}. A gain counts as positive."""
    gains: dict[tuple[str, str], float] = {}
    for one in tries:
        if one.verdict is not None and one.outcome == Outcome.HELPS:
            key = (str(one.began["size"]), str(one.verdict["unit"]))
            gains[key] = gains.get(key, 0.0) - float(one.verdict["effect"])
    return gains


def summary(tries: Sequence[Try]) -> list[tuple[str, str]]:
    """What the whole series comes to, as (name, value)."""
    helped = sum(one.outcome == Outcome.HELPS for one in tries)
    seconds = sum(float(one.verdict["seconds"] or 0) for one in tries if one.verdict)
    pairs = [("tries", str(len(tries))), ("helped", str(helped))]
    pairs += [
        (f"cumulated gain at {size}", f"{gain:.4f} {unit}") for (size, unit), gain in cumulated(tries).items()
    ]
    pairs.append(("training time", _time_text(seconds)))
    if tries:
        alpha = max(float(one.began["alpha"]) for one in tries)
        pairs.append(("false among what helped", f"at most {100 * alpha:g} % expected"))
    return pairs


def write_lab_page(path: Path, entries: Sequence[Entry], tries: Sequence[Try], notes: Sequence[str]) -> None:
    sections = [
        Section(
            "effects",
            "What was tried",
            _tries_table(tries),
            _effects_figure(tries) if any(one.verdict for one in tries) else None,
            "Effect of each try on its baseline with its confidence interval; below zero is better. Filled"
            " circle: helps. Open circle: no effect worth having. Cross: hurts. Diamond: undecided.",
        ),
        *(
            Section(
                f"gain-{index}",
                f"Cumulated gain at {size}",
                '<p class="quiet">Sum of the measured gains of what helped. Each was measured against its own'
                " baseline. What is picked because it measured well tends to be worth a little less.</p>",
                _gain_figure(tries, size, unit),
                f"Sum of gains in {unit} after each try.",
            )
            for index, (size, unit) in enumerate(cumulated(tries))
        ),
        Section("levels", "The bar", _levels_text(tries), _levels_figure(tries) if tries else None),
        Section("comparisons", "Races and ladders", _comparisons_table(entries)),
    ]
    if notes:
        sections.append(Section("notes", "Notes", "".join(f"<p>{escape(note)}</p>" for note in notes)))
    write_sheet(path, "Lab", facts_list(summary(tries)), sections)


def _tries_table(tries: Sequence[Try]) -> str:
    if not tries:
        return "<p>No gates yet: <code>hotlap race BASE IDEA --gate</code>.</p>"
    table = [_cells(one, row) for one, row in zip(tries, rows(tries), strict=True)]
    return sortable_table("Tries", headers(), table)


def _cells(one: Try, texts: Sequence[str]) -> list[Cell]:
    cells: list[Cell] = [(escape(text), text) for text in texts]
    verdict = one.verdict or {}
    numbers = [one.began["number"], None, None, None, None]
    numbers += [verdict.get("effect"), verdict.get("p"), one.began["level"]]
    numbers += [verdict.get("rounds"), verdict.get("seconds")]
    for index, value in enumerate(numbers):
        if value is not None:
            cells[index] = (cells[index][0], float(value))
    idea = one.began["idea"]
    cells[1] = (
        f"{escape(str(idea['label']))}<small>{escape(str(idea['sentence']))}</small>"
        f"<small>{escape(str(idea['hash'])[:8])}</small>",
        str(idea["label"]),
    )
    if one.outcome == Outcome.HELPS:
        cells[4] = (f"<b>{cells[4][0]}</b>", one.outcome)
    return cells


def _effects_figure(tries: Sequence[Try]) -> Figure:
    traces = []
    for outcome, (color, symbol) in LOOKS.items():
        found = [
            (one, one.verdict)
            for one in tries
            if one.verdict is not None and one.outcome == outcome and one.verdict["effect"] is not None
        ]
        if not found:
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": str(outcome),
                "meta": str(outcome),
                "x": [one.began["number"] for one, _ in found],
                "y": [verdict["effect"] for _, verdict in found],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [_arm(verdict, "high", 1) for _, verdict in found],
                    "arrayminus": [_arm(verdict, "low", -1) for _, verdict in found],
                    "color": color,
                    "thickness": 1.5,
                },
                "text": [
                    f"{escape(str(one.began['idea']['label']))}: {escape(str(verdict['words']))}"
                    for one, verdict in found
                ],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {
                    "color": color,
                    "symbol": symbol,
                    "size": 10,
                    "line": {"width": 2, "color": color},
                },
            }
        )
    units = {str(one.verdict["unit"]) for one in tries if one.verdict}
    return {
        "data": traces,
        "layout": {
            "xaxis": _tries_axis(len(tries)),
            "yaxis": {"title": {"text": f"effect in {' or '.join(sorted(units))}"}, "automargin": True},
        },
    }


def _arm(verdict: Mapping[str, Any], end: str, sign: int) -> float:
    return 0.0 if verdict[end] is None else sign * (float(verdict[end]) - float(verdict["effect"]))


def _gain_figure(tries: Sequence[Try], size: str, unit: str) -> Figure:
    at_size = [one for one in tries if one.began["size"] == size]
    gains = [
        -float(one.verdict["effect"])
        if one.verdict is not None and one.outcome == Outcome.HELPS and one.verdict["unit"] == unit
        else 0.0
        for one in at_size
    ]
    figure = _steps(at_size, list(accumulate(gains)), f"cumulated gain in {unit}", LOOKS[Outcome.HELPS][0])
    figure["layout"]["yaxis"]["range"] = _from_zero(figure["data"][0]["y"])
    return figure


def _from_zero(values: Sequence[float]) -> list[float]:
    """A range with zero in it: Plotly's own for equal values is ±1."""
    low, high = min(0.0, *values), max(0.0, *values)
    margin = 0.05 * (high - low) or 1.0
    return [low - margin, high + margin]


def _levels_figure(tries: Sequence[Try]) -> Figure:
    figure = _steps(tries, [float(one.began["level"]) for one in tries], "level of “helps”", "#0072B2")
    figure["layout"]["yaxis"]["type"] = "log"
    return figure


def _steps(tries: Sequence[Try], values: Sequence[float], title: str, color: str) -> Figure:
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "meta": title,
        "name": title,
        "x": [one.began["number"] for one in tries],
        "y": list(values),
        "line": {"shape": "hv", "color": color, "width": 2},
    }
    layout = {
        "xaxis": _tries_axis(len(tries)),
        "yaxis": {"title": {"text": title}, "automargin": True},
    }
    return {"data": [trace], "layout": layout}


def _tries_axis(count: int) -> Figure:
    """Ticks at whole numbers only."""
    every = max(1, -(-count // 12))
    return {"title": {"text": "try"}, "automargin": True, "tickformat": "d", "tick0": 1, "dtick": every}


def _levels_text(tries: Sequence[Try]) -> str:
    if not tries:
        return "<p>The first try sets it.</p>"
    return (
        '<p class="quiet">The chance that a worthless idea passes as “helps”, by try. It falls as tries go by'
        " and rises after each one that helped (LORD++), so that of all ideas that “helped” the expected"
        " share of false ones stays below the limit.</p>"
    )


def _comparisons_table(entries: Sequence[Entry]) -> str:
    others = [entry for entry in entries if entry["kind"] in ("race", "ladder")]
    if not others:
        return "<p>None yet.</p>"
    table: list[list[Cell]] = [
        [
            (escape(str(entry["idea"]["label"])), str(entry["idea"]["label"])),
            (escape(str(entry["kind"])), str(entry["kind"])),
            (escape(str(entry["parent"])), str(entry["parent"])),
            (escape(str(entry["size"])), str(entry["size"])),
            (number(_known(entry.get("seeds")), 0), _known(entry.get("seeds"))),
            (_time_text(entry.get("seconds")), _known(entry.get("seconds"))),
            (escape(str(entry["words"])), str(entry["words"])),
        ]
        for entry in others
    ]
    names = ["idea", "kind", "against", "size", "seeds", "time", "result"]
    return sortable_table("Comparisons outside of the series", names, table)


def _known(value: Any) -> float:
    return math.nan if value is None else float(value)
