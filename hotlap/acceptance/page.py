"""The findings as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from hotlap.acceptance.checks import Finding
from hotlap.report.markup import plain_table

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # nothing is loaded from anywhere


def render(facts: Mapping[str, Any], findings: Sequence[Finding]) -> str:
    """`facts` describe the machine, as `hotlap doctor` prints them."""
    title = f"Hotlap on {facts['device_name']}"
    style = (resources.files("hotlap.report") / "page.css").read_text(encoding="utf-8")
    checks = plain_table(
        "Checks",
        ("check", "outcome", "finding", "seconds"),
        [(f.name, f.outcome, f.detail, f"{f.seconds:.1f}") for f in findings],
    )
    machine = plain_table("Machine", ("", ""), [(name, str(value)) for name, value in facts.items()])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{escape(verdict(findings))}</p></header>"
        f"<main><section>{checks}</section><section>{machine}</section></main></body></html>\n"
    )


def verdict(findings: Sequence[Finding]) -> str:
    counts = {
        outcome: sum(f.outcome == outcome for f in findings) for outcome in ("passed", "failed", "skipped")
    }
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
