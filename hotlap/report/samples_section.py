"""The page's section on samples: the text after each milestone, and what changed since the one before.

A milestone is a quarter of the run, or its end. Words that the milestone before did not have at this place
are marked, and those that it had instead are struck through; the page shows both while its switch is on.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from html import escape

from hotlap.report.analysis import RunsByLabel
from hotlap.report.markup import folded
from hotlap.runs.reader import Sample


def samples(runs_by_label: RunsByLabel) -> str:
    parts: list[str] = []
    for runs in runs_by_label.values():
        for run in runs:
            if run.samples:
                body = _milestones(run.samples)
                parts.append(folded(f"samples {run.name}", run.name, body, is_open=not parts))
    return "".join(parts) or "<p>No samples yet.</p>"


def _milestones(of_run: Sequence[Sample]) -> str:
    """Newest first. The first milestone has nothing before it."""
    shown = []
    for number, sample in enumerate(of_run):
        text = with_changes(of_run[number - 1].text, sample.text) if number else escape(sample.text)
        shown.append(f"<h4>step {sample.step:,}</h4><pre>{text}</pre>")
    return "".join(reversed(shown))


def with_changes(before: str, after: str) -> str:
    """The second text as HTML: in <ins> the words that the first did not have there, in <del> its own."""
    return "".join(_marked(kind, old, new) for kind, old, new in _changes(before, after))


def _marked(kind: str, old: str, new: str) -> str:
    if kind == "equal":
        return escape(new)
    return (f"<del>{escape(old)}</del>" if old else "") + (f"<ins>{escape(new)}</ins>" if new else "")


def _changes(before: str, after: str) -> Iterator[tuple[str, str, str]]:
    old, new = (re.findall(r"\s*\S+|\s+$", text) for text in (before, after))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, first, last, new_first, new_last in matcher.get_opcodes():
        yield kind, "".join(old[first:last]), "".join(new[new_first:new_last])
