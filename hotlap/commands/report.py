"""`hotlap report RUN…`: writes one HTML file for one run or many, and prints the verdicts."""

from __future__ import annotations

import argparse
import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.cli import Parser
from hotlap.terminal import make_console

if TYPE_CHECKING:
    from hotlap.runs.reader import Run


def configure(parser: Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="a run directory, or a directory of runs"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: report.html in the first RUN")
    parser.add_argument("--png", metavar="FILE", type=Path, help="also write the main plot as a PNG")
    parser.add_argument("--title", help="default: the name of the first RUN")
    parser.add_argument(
        "--metric",
        help="the metric of the verdict: train_s, tokens, bpb, loss or tokens_per_s"
        " (default: time to the target, else bits per byte, else loss)",
    )
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON")


def run(args: argparse.Namespace) -> int:
    from hotlap.runs.reader import load_runs

    runs = load_runs(args.runs)
    # After the runs are read: SciPy takes a second to import, and a mistake should be reported before that.
    from hotlap.report.analysis import analyze, to_json
    from hotlap.report.page import write_report
    from hotlap.report.picture import write_picture

    runs_by_label, notes = labeled(args.runs, runs)
    analysis = analyze(runs_by_label, args.metric, notes)
    title = args.title or args.runs[0].resolve().name
    out = args.out or args.runs[0] / "report.html"
    if args.png:
        write_picture(runs_by_label, args.png, title)
    write_report(runs_by_label, out, title, metric=args.metric, notes=notes)
    console = make_console()
    if args.json:
        console.print_json(json.dumps(to_json(analysis)), ensure_ascii=True)
    else:
        for row in analysis.rows:
            if row.verdict:
                console.print(f"{row.label}: {row.verdict.words}", markup=False, soft_wrap=True)
            if row.equal_time:
                line = f"{row.label}, at equal time: {row.equal_time.words}"
                console.print(line, markup=False, soft_wrap=True)
        for note in analysis.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        for written in filter(None, (out, args.png)):
            console.print(f"wrote {written}", markup=False, soft_wrap=True)
    if args.open:
        webbrowser.open(out.resolve().as_uri())
    return 0


def labeled(paths: Sequence[Path], runs: Sequence[Run]) -> tuple[dict[str, list[Run]], list[str]]:
    """Runs of a race by the labels of its plan, and notes on those that are missing.

    Other runs are labeled by their settings.
    """
    from hotlap.race.directory import RaceDirectory
    from hotlap.race.results import left_out, load_race
    from hotlap.report.analysis import label_runs

    race = RaceDirectory(paths[0])
    if len(paths) == 1 and race.plan_path.exists():
        plan = race.read_plan()
        runs_by_label = load_race(race, plan, whole_rounds=False)
        return runs_by_label, left_out(race, plan, runs_by_label)
    return label_runs(runs), []
