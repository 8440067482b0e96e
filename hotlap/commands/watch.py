"""`hotlap watch [RUN]`: serves the report of a run, a race or a folder of runs while they train, until
interrupted.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from hotlap.cli import Parser
from hotlap.terminal import make_console


def configure(parser: Parser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="the directory of a run, of a race or of many runs to choose from (default: runs)",
    )
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    from hotlap.race.directory import PLAN_NAME
    from hotlap.race.watched import WatchedRace
    from hotlap.report.folder import WatchedFolder
    from hotlap.report.live import LiveServer, Watched, WatchedRun
    from hotlap.runs.reader import CONFIG_NAME

    watched: Watched
    if (args.run / PLAN_NAME).is_file():
        watched = WatchedRace(args.run)
    elif (args.run / CONFIG_NAME).is_file():
        watched = WatchedRun(args.run)
    else:
        watched = WatchedFolder(args.run)
    with LiveServer(watched, args.port) as server:
        console = make_console()
        console.print(f"watching {args.run} at {server.url} (Ctrl-C stops)", markup=False, soft_wrap=True)
        if args.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped")
    return 0
