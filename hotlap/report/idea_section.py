"""The page's section on ideas: what each one changes, side by side with its parent, and its source."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from hotlap.report.analysis import RunsByLabel
from hotlap.report.markup import folded


def ideas(runs_by_label: RunsByLabel) -> str:
    """Empty without ideas. Each idea once, under the labels that have it."""
    labels: dict[str, list[str]] = {}
    facts: dict[str, Mapping[str, Any]] = {}
    for label, runs in runs_by_label.items():
        for idea in runs[0].environment.get("ideas") or []:
            if isinstance(idea, dict):
                identity = str(idea.get("idea"))
                labels.setdefault(identity, []).append(label)
                facts[identity] = idea
    return "".join(_one(identity, labels[identity], facts[identity]) for identity in facts)


def _one(identity: str, labels: Sequence[str], idea: Mapping[str, Any]) -> str:
    parent = str(idea.get("parent"))
    rows = [row for row in idea.get("differences") or [] if isinstance(row, dict)]
    tables = "".join(_side_by_side(row, parent, identity) for row in rows)
    source = f"<pre>{escape(str(idea.get('source')))}</pre>"
    return (
        f"<h3>{escape(', '.join(labels))}</h3><p>{escape(str(idea.get('sentence')))} "
        f'<span class="quiet">{escape(identity)}, on {escape(parent)}</span></p>{tables}'
        + folded(f"source {identity}", f"the whole file {identity}", source)
    )


def _side_by_side(row: Mapping[str, Any], parent: str, identity: str) -> str:
    """Two columns of lines; what only one of them has is marked."""
    before, after = (str(row.get(side, "")).splitlines() for side in ("before", "after"))
    lines = "".join(
        f'<tr><td class="{"removed" if differs else ""}">{escape(left)}</td>'
        f'<td class="{"added" if differs else ""}">{escape(right)}</td></tr>'
        for left, right, differs in aligned(before, after)
    )
    what = escape(str(row.get("what")))
    name = escape(identity.partition("@")[0])
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{what}"><table class="source">'
        f"<caption>{what}</caption><thead><tr><th>{escape(parent)}</th><th>{name}</th></tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
    )


def aligned(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """(left line, right line, whether they differ), with empty lines where one side has none."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, first, last, other_first, other_last in matcher.get_opcodes():
        left, right = before[first:last], after[other_first:other_last]
        for number in range(max(len(left), len(right))):
            yield (
                left[number] if number < len(left) else "",
                right[number] if number < len(right) else "",
                kind != "equal",
            )
