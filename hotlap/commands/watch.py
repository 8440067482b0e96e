"""`hotlap watch RUN`: serves the report of a run or a race while it trains, until interrupted."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from hotlap.cli import Parser
from hotlap.terminal import make_console


def configure(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a run or of a race")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    from hotlap.race.directory import PLAN_NAME
    from hotlap.race.watched import WatchedRace
    from hotlap.report.live import LiveServer, WatchedRun

    is_race = (args.run / PLAN_NAME).is_file()
    with LiveServer(WatchedRace(args.run) if is_race else WatchedRun(args.run), args.port) as server:
        console = make_console()
        console.print(f"watching {args.run} at {server.url} (Ctrl-C stops)", markup=False, soft_wrap=True)
        if args.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped")
    return 0
