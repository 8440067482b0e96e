"""`hotlap ladder BASE IDEA`: the same comparison at several sizes, and how the effect goes with compute."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotlap.cli import Parser
from hotlap.commands.race import DEFAULT_SEEDS, check_runs, parse_seconds
from hotlap.config import Config
from hotlap.errors import INTERRUPTED, ConfigError
from hotlap.progress import to_stderr
from hotlap.race.engine import LOCAL, open_engine
from hotlap.recipes import SIZES
from hotlap.settings import parse
from hotlap.terminal import make_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotlap.race.directory import RaceDirectory
    from hotlap.race.plan import Plan

DEFAULT_SIZES = "pico,nano,micro"


def configure(parser: Parser) -> None:
    parser.takes_settings = True
    parser.usage = "hotlap ladder BASE IDEA [--sizes pico,nano,micro] [options] [--SETTING VALUE …]"
    parser.add_argument("recipes", metavar="RECIPE", nargs="*", help="a baseline and an idea, as for race")
    parser.add_argument(
        "--sizes",
        default=DEFAULT_SIZES,
        metavar="A,B,C",
        help=f"three or more of {', '.join(SIZES)} (default: {DEFAULT_SIZES})",
    )
    parser.add_argument(
        "--steps-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="train this share of each size's steps (default: all of them)",
    )
    parser.add_argument(
        "--seeds", type=int, default=DEFAULT_SEEDS, metavar="N", help="runs per recipe and size"
    )
    parser.add_argument(
        "--budget", metavar="TIME", help="at each size, do not start a round that would exceed this time"
    )
    parser.add_argument("--name", help="name of the ladder's directory (default: derived from the plan)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="parent of the ladder's directory")
    parser.add_argument("--procs", type=int, help="processes per run")
    parser.add_argument("--on", default=LOCAL, metavar="ENGINE", help=f"as for race (default: {LOCAL})")
    parser.epilog = "Repeat the same command to go on with a ladder that was stopped."


def run(args: argparse.Namespace) -> int:
    from hotlap.lab.ladder import ROW_HEADERS, conclude_ladder, make_ladder
    from hotlap.lab.ledger import Ledger
    from hotlap.race.directory import RaceDirectory
    from hotlap.race.results import conclude
    from hotlap.runs.directory import check_name

    if len(args.recipes) != 2:
        raise ConfigError(
            expected="two recipes, a baseline and an idea",
            found=str(len(args.recipes)),
            do="write hotlap ladder BASE IDEA",
        )
    sizes = [size for size in args.sizes.split(",") if size]
    settings = parse(Config, args.settings)
    plans = make_ladder(args.recipes, sizes, args.seeds, settings, args.steps_share, args.procs)
    budget_s = None if args.budget is None else parse_seconds(args.budget)
    if args.name is not None:
        check_name(args.name)
    path = args.runs / (args.name or default_name(plans))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    trained = 0
    try:
        for plan in plans:
            directory = RaceDirectory(path / plan.size)
            to_stderr(f"ladder: {plan.size} in {directory.path}")
            trained += _run_rung(plan, directory, args.on, budget_s)
            conclude(directory, plan)
    except KeyboardInterrupt:
        to_stderr("ladder: stopped; repeat the command to go on")
        return INTERRUPTED
    data = conclude_ladder(path, plans, flops_of_sizes(plans))
    if trained:
        Ledger(args.runs).add("ladder", data, to_stderr)
    _show(ROW_HEADERS, data, path)
    return 0


def _run_rung(plan: Plan, directory: RaceDirectory, on: str, budget_s: float | None) -> int:
    """Train what is left of one size; the number of runs that ended."""
    from hotlap.race.progress import RaceProgress
    from hotlap.race.runner import Runner

    check_runs(plan, directory, on)
    directory.check(plan)
    with directory.lock(to_stderr) as lock:
        directory.check(plan)
        directory.write_plan(plan)
        done = sum(directory.is_over(start) for round_ in plan.rounds() for start in round_)
        with (
            RaceProgress(plan, done) as progress,
            open_engine(on, directory.path, lock, progress.say) as engine,
        ):
            Runner(plan, directory, engine, progress).run(budget_s)
            return progress.done - done


def flops_of_sizes(plans: Sequence[Plan]) -> dict[str, float]:
    """{size: training FLOPs of a run of the baseline}, with the ladder's settings and share of steps."""
    from hotlap.recipes import resolve
    from hotlap.train.flops import flops_per_token

    first = plans[0].config(plans[0].rounds()[0][0])
    share = first.schedule.steps / resolve(first.recipe, plans[0].size).schedule.steps
    found = {}
    for size in SIZES:
        config = resolve(plans[0].entries[0].recipe, size)
        steps = max(1, round(config.schedule.steps * share))
        tokens = steps * config.batch.tokens_per_step
        found[size] = flops_per_token(config, config.schedule.steps) * tokens
    return found


def default_name(plans: Sequence[Plan]) -> str:
    from hotlap.race.plan import to_json

    content = json.dumps([{**to_json(plan), "seeds": None} for plan in plans], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:6]
    return f"ladder-{plans[0].entries[0].recipe}-{digest}"


def _show(headers: Sequence[str], data: dict[str, Any], path: Path) -> None:
    from rich.table import Table

    from hotlap.lab.ladder import rung_row
    from hotlap.lab.scaling import Rung
    from hotlap.report.analysis import METRICS

    console = make_console()
    drawn = Table(box=None, pad_edge=False)
    for header in headers:
        drawn.add_column(header, overflow="fold")
    for one in data["rungs"]:
        rung = Rung(**{name: value for name, value in one.items() if name != "interval"})
        drawn.add_row(*rung_row(rung, METRICS[data["metric"]]))
    console.print(drawn)
    console.print(f"{data['idea']['label']}: {data['words']}", markup=False, soft_wrap=True)
    console.print(f"report: {path / 'report.html'}", markup=False, soft_wrap=True)
