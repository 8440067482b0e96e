"""HTML building blocks of the page's sections: numbers, tables, collapsible parts, color swatches.

The page's script sorts tables of class `sortable` by the cells' `data-value`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from hotlap.report.curves import style_of

# A cell: its HTML and the value it is sorted by. None sorts last in both directions.
Cell = tuple[str, float | str | None]


def number(value: float, decimals: int, unit: str = "") -> str:
    return f"{value:,.{decimals}f}{unit and ' ' + unit}" if math.isfinite(value) else "–"


def facts_list(pairs: Iterable[tuple[str, str]]) -> str:
    """The boxes below a page's title."""
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
        + "</dl>"
    )


def sortable_table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(h)}</button></th>' for h in headers
    )
    body = "".join(
        "<tr>" + "".join(_cell(text, value, is_first=i == 0) for i, (text, value) in enumerate(row)) + "</tr>"
        for row in rows
    )
    return _table(caption, head, body, kind="sortable")


def _cell(text: str, value: float | str | None, *, is_first: bool) -> str:
    unknown = value is None or (isinstance(value, float) and math.isnan(value))
    key = "" if unknown else escape(str(value))
    return (
        f'<th scope="row" data-value="{key}">{text}</th>'
        if is_first
        else f'<td data-value="{key}">{text}</td>'
    )


def plain_table(caption: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that cannot be sorted. Every cell is escaped."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in headers)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(c)}</td>" for c in rest) + "</tr>"
        for first, *rest in rows
    )
    return _table(caption, head, body, kind="plain")


def _table(caption: str, head: str, body: str, kind: str) -> str:
    """A table in a scrollable region that can be focused with the keyboard."""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def folded(key: str, title: str, body: str, *, is_open: bool = False) -> str:
    """A collapsible part. The live page uses its key to keep it open across updates."""
    return (
        f'<details data-key="{escape(key)}"{" open" if is_open else ""}><summary>{escape(title)}</summary>'
        f"{body}</details>"
    )


def swatch(index: int) -> str:
    return f'<span class="swatch" style="--color:{style_of(index)[0]}" aria-hidden="true"></span>'
