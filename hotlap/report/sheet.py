"""A page of sections in the look of the reports, for what is no set of runs: the ledger, a ladder.

Like a report it is one file with everything embedded, and its security policy forbids network requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from hotlap.json_files import finite
from hotlap.report.figures import Figure
from hotlap.report.page import asset, embedded_json, encoded, scripts, write_file


@dataclass(frozen=True)
class Section:
    """A heading with HTML below it; text in it has been escaped. A figure stands above the HTML."""

    key: str
    title: str
    body: str
    figure: Figure | None = None
    caption: str = ""


def render_sheet(title: str, headline: str, sections: Sequence[Section]) -> str:
    figures = {section.key: section.figure for section in sections if section.figure}
    return Template(asset("sheet.html")).substitute(
        title=escape(title),
        style=asset("page.css"),
        headline=headline,
        sections="\n".join(map(_section, sections)),
        plotly=get_plotlyjs(),
        figures=embedded_json(finite(figures)),
        scripts=scripts("figures.js", "page.js"),
    )


def write_sheet(path: Path, title: str, headline: str, sections: Sequence[Section]) -> None:
    write_file(path, encoded(render_sheet(title, headline, sections)))


def _section(section: Section) -> str:
    figure = (
        f'<figure><div class="plot tall" id="{section.key}" role="img" aria-label="{escape(section.title)}">'
        f"</div><figcaption>{escape(section.caption)}</figcaption></figure>"
        if section.figure
        else ""
    )
    heading = f'<h2 id="h-{section.key}">{escape(section.title)}</h2>'
    return f'<section aria-labelledby="h-{section.key}">{heading}\n{figure}\n{section.body}\n</section>'
