"""`hotlap watch RUN`: serves a run's report on this machine while it trains, until interrupted."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from hotlap.cli import Parser
from hotlap.terminal import make_console


def configure(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    from hotlap.report.live import LiveServer

    with LiveServer(args.run, args.port) as server:
        console = make_console()
        console.print(f"watching {args.run} at {server.url} (Ctrl-C stops)", markup=False, soft_wrap=True)
        if args.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped")
    return 0
