"""`hotlap lab`: what was tried in a directory of runs, as a table and as a page."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.errors import RaceError
from hotlap.terminal import make_console

if TYPE_CHECKING:
    from hotlap.cli import Parser


def configure(parser: Parser) -> None:
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="the directory of runs (default: runs)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="the page (default: lab.html in it)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--json", action="store_true", help="print all lines of the ledger as one JSON list")


def run(args: argparse.Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    from hotlap.lab.ledger import Ledger

    ledger = Ledger(args.runs)
    if not ledger.path.exists():
        raise RaceError(
            expected=f"a ledger at {ledger.path}",
            found="none" if args.runs.is_dir() else f"no directory {args.runs}",
            do="try an idea with `hotlap race BASE IDEA --gate`",
        )
    entries, torn = ledger.entries(), ledger.torn_bytes()
    from hotlap.lab.page import headers, rows, summary, write_lab_page

    tries = ledger.tries()
    notes = (
        [f"{ledger.path.name}: a torn last line of {torn} bytes was left out; the next gate removes it"]
        if torn
        else []
    )
    out = args.out or args.runs / "lab.html"
    write_lab_page(out, entries, tries, notes)
    if args.json:
        sys.stdout.write(json.dumps(entries, indent=1) + "\n")
        return 0
    console = make_console()
    drawn = Table(box=None, pad_edge=False)
    for header in headers():
        drawn.add_column(header, overflow="fold")
    for row in rows(tries):
        drawn.add_row(*map(escape, row))
    console.print(drawn)
    for name, value in summary(tries):
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(f"wrote {out}", markup=False, soft_wrap=True)
    if args.open:
        webbrowser.open(out.resolve().as_uri())
    return 0
