"""The page's section on parameters: how many each recipe has, by what trains them, and each by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from hotlap.report.analysis import RunsByLabel
from hotlap.report.lead import parameters_of
from hotlap.report.markup import Cell, folded, number, plain_table, sortable_table, swatch
from hotlap.runs.reader import Run
from hotlap.settings import shown


def parameters(runs_by_label: RunsByLabel) -> str:
    return _counts(runs_by_label) + _routing(runs_by_label)


def _counts(runs_by_label: RunsByLabel) -> str:
    """A table of the recipes with their parameters: all, and by role and optimizer."""
    counts = {label: _by_role(runs[0]) for label, runs in runs_by_label.items()}
    roles = list(dict.fromkeys(role for by_role in counts.values() for role in by_role))
    rows: list[list[Cell]] = []
    for index, (label, runs) in enumerate(runs_by_label.items()):
        values = [parameters_of(runs[0]), *(counts[label].get(role, 0) for role in roles)]
        cells: list[Cell] = [(number(value or math.nan, 0), value or None) for value in values]
        rows.append([(swatch(index) + escape(label), label), *cells])
    return sortable_table("Parameters", ["recipe", "all", *roles], rows)


def _by_role(run: Run) -> dict[str, int]:
    """{role and optimizer: parameters}; empty if the routing was not recorded."""
    counts: dict[str, int] = {}
    for entry in _entries(run):
        role, optimizer = entry.get("role"), entry.get("optimizer", "")
        name = f"{role} ({optimizer})" if role else str(optimizer)
        counts[name] = counts.get(name, 0) + _size(entry.get("shape"))
    return counts


def _size(shape: Any) -> int:
    dimensions = shape if isinstance(shape, list) else []
    return math.prod(n for n in dimensions if isinstance(n, int))


def _entries(run: Run) -> list[dict[str, Any]]:
    entries = run.environment.get("routing") or []
    return [entry for entry in entries if isinstance(entry, dict)]


def _routing(runs_by_label: RunsByLabel) -> str:
    """One table for all labels with the same routing."""
    tables = {label: _routing_table(runs[0]) for label, runs in runs_by_label.items()}
    return "".join(
        folded(f"routing {'|'.join(labels)}", f"every parameter of {', '.join(labels)}", table)
        for table, labels in _by_content(tables).items()
    )


def _by_content(content: Mapping[str, str]) -> dict[str, list[str]]:
    """Group labels by equal content: {content: labels}."""
    groups: dict[str, list[str]] = {}
    for label, text in content.items():
        groups.setdefault(text, []).append(label)
    return groups


def _routing_table(run: Run) -> str:
    rows = [
        [
            str(entry.get("parameter", "")),
            _shape(entry.get("shape")),
            str(entry.get("optimizer", "")),
            shown(entry.get("lr")),
            shown(entry.get("owner")),
        ]
        for entry in _entries(run)
    ]
    if not rows:
        return "<p>The routing has not been recorded.</p>"
    return plain_table(
        "Parameters by optimizer", ["parameter", "shape", "optimizer", "learning rate", "owner rank"], rows
    )


def _shape(shape: Any) -> str:
    return " × ".join(map(str, shape)) if isinstance(shape, list) and shape else "scalar"
