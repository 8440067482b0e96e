"""`hotlap race RECIPE…`: compare recipes and variants over several seeds, with a significance test."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotlap.cli import Parser
from hotlap.commands import gate
from hotlap.commands.train import default_size
from hotlap.config import Config
from hotlap.errors import INTERRUPTED, ConfigError
from hotlap.progress import to_stderr
from hotlap.race.engine import LOCAL, RAY, check_engine, open_engine
from hotlap.recipes import SIZES
from hotlap.settings import parse
from hotlap.terminal import make_console

if TYPE_CHECKING:
    from hotlap.race.directory import RaceDirectory
    from hotlap.race.plan import Plan, Start

DEFAULT_SEEDS = 3
SECONDS = {"h": 3600, "m": 60, "s": 1}


def configure(parser: Parser) -> None:
    parser.usage = "hotlap race RECIPE[:[NAME,]setting=value,…] … [options] [--SETTING VALUE …]"
    parser.add_argument(
        "recipes",
        metavar="RECIPE",
        nargs="*",
        help="a recipe, or a variant such as softcap:optim.muon.lr=0.03; the first is the baseline",
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="resume the race in DIR")
    add_options(parser)
    gate.add_options(parser)


def add_options(parser: Parser) -> None:
    """Add the options that `race` and `ablate` share."""
    parser.takes_settings = True
    parser.add_argument("--size", help=f"one of {', '.join(SIZES)} (default: nano on a CPU, small on CUDA)")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs per recipe (default: {DEFAULT_SEEDS})")
    parser.add_argument(
        "--budget", metavar="TIME", help="do not start a round that would exceed this time, such as 10m"
    )
    parser.add_argument("--name", help="name of the race's directory (default: derived from the plan)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="parent of the race's directory")
    parser.add_argument("--procs", type=int, help="processes per run")
    parser.add_argument(
        "--on",
        default=LOCAL,
        metavar="ENGINE",
        help=f"{LOCAL} (default), or {RAY}[=ADDRESS]: on the machines of a Ray cluster, many runs at once",
    )
    parser.epilog = (
        "Settings, such as --target-bpb 1.5 or --steps 200, apply to every run; `hotlap train --help` lists"
        " them.\nRepeat the same command to resume a race that was stopped."
    )


def run(args: argparse.Namespace) -> int:
    from hotlap.race.directory import RaceDirectory
    from hotlap.race.plan import make_plan, parse_spec

    if args.gate:
        gate.check_options(args)
        budget_s = None if args.budget is None else parse_seconds(args.budget)
        for spec in args.recipes:
            parse_spec(spec)
        size, _, settings = common_options(args)
        seeds = gate.DEFAULT_MOST_SEEDS if args.seeds is None else args.seeds
        plan = make_plan(args.recipes, size, seeds, settings, args.procs, first_seed=args.first_seed or 0)
        return gate.run_gate(args, plan, budget_s)
    gate.check_unused(args)
    if args.resume is None:
        for spec in args.recipes:
            parse_spec(spec)  # report mistakes before common_options imports torch, which takes seconds
        size, seeds, settings = common_options(args)
        plan = make_plan(args.recipes, size, seeds, settings, args.procs)
        return run_race(plan, race_directory(args, plan), args.on, args.budget)
    given = [*args.recipes, *(f"--{name}" for name in args.settings)]
    given += [f"--{name}" for name in ("size", "seeds", "procs", "name") if getattr(args, name) is not None]
    if given:
        raise ConfigError(expected="--resume DIR alone", found=" ".join(given), do="omit them")
    directory = RaceDirectory(args.resume)
    return run_race(directory.read_plan(), directory, args.on, args.budget)


def race_directory(args: argparse.Namespace, plan: Plan) -> RaceDirectory:
    from hotlap.race.directory import RaceDirectory
    from hotlap.runs.directory import check_name

    if args.name is not None:
        check_name(args.name)
    return RaceDirectory(args.runs / (args.name or plan.default_name))


def common_options(args: argparse.Namespace) -> tuple[str, int, dict[str, Any]]:
    """(size, seeds, settings)."""
    settings = parse(Config, args.settings)
    size = args.size or default_size(settings.get("runtime.device", "auto"))
    return size, DEFAULT_SEEDS if args.seeds is None else args.seeds, settings


def run_race(
    plan: Plan, directory: RaceDirectory, on: str, budget: str | None, notes: Sequence[str] = ()
) -> int:
    """Run the remaining runs on the engine `on`, then print the results and write the report."""
    from hotlap.lab.ledger import Ledger
    from hotlap.lab.races import add_race
    from hotlap.race.progress import RaceProgress
    from hotlap.race.runner import Runner

    check_runs(plan, directory, on)
    budget_s = None if budget is None else parse_seconds(budget)
    directory.check(plan)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with directory.lock(to_stderr) as lock:
            directory.check(plan)
            directory.write_plan(plan)
            for line in (*header_lines(plan, directory), *notes):
                to_stderr(line)
            done = sum(directory.is_over(start) for round_ in plan.rounds() for start in round_)
            with (
                RaceProgress(plan, done) as progress,
                open_engine(on, directory.path, lock, progress.say) as engine,
            ):
                skipped = Runner(plan, directory, engine, progress).run(budget_s)
                trained = progress.done - done
    except KeyboardInterrupt:
        to_stderr(f"race: stopped; resume with: hotlap race --resume {directory.path}")
        return INTERRUPTED
    results = show(plan, directory, skipped, budget, make_console())
    if trained:
        add_race(Ledger(directory.path.parent), directory, plan, results, to_stderr)
    return 0


def check_runs(plan: Plan, directory: RaceDirectory, on: str) -> None:
    """Refuse runs that cannot train on this engine, before anything is written."""
    from hotlap.race.idea_copies import check_ideas
    from hotlap.train.run import check_ranks

    for start in plan.rounds()[0]:
        check_ranks(plan.config(start), plan.procs or 1)
    check_engine(on, directory.path, [plan.config(start) for start in plan.rounds()[0]], plan.procs)
    check_ideas(plan, directory.ideas)
    elsewhere = next((e for e in plan.entries if e.ideas or e.commit), None) if on != LOCAL else None
    if elsewhere is not None:
        raise ConfigError(
            expected=f"recipes of the lineage for --on {on}",
            found=f"{elsewhere.label}, whose code is on this machine only",
            do="race it with --on local",
        )


def parse_seconds(text: str) -> float:
    """Seconds of a time such as `90s`, `10m` or `1h30m`."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not match or not any(map(int, match.groups(default="0"))):
        raise ConfigError(
            expected="--budget as a time such as 90s, 10m or 1h30m", found=f"`{text}`", do="change it"
        )
    return sum(int(number or 0) * unit for number, unit in zip(match.groups(), SECONDS.values(), strict=True))


def header_lines(plan: Plan, directory: RaceDirectory) -> list[str]:
    lines = [f"race: {len(plan.entries)} × {plan.seeds} seeds at {plan.size} in {directory.path}"]
    lines += [
        f"race: {entry.label} repeats an earlier entry; its seeds start at {entry.first_seed}"
        for entry in plan.entries
        if entry.first_seed
    ]
    return lines


def show(
    plan: Plan, directory: RaceDirectory, skipped: Sequence[Start], budget: str | None, console: Console
) -> dict[str, Any]:
    """Print the results of a race, and return the data of its `results.json`."""
    from hotlap.race.results import conclude, table, verdict_lines

    data = conclude(directory, plan)
    headers, rows = table(data["statistics"], full=True)
    drawn = Table(box=None, pad_edge=False)
    for header in headers:
        drawn.add_column(header, overflow="fold")
    for row in rows:
        drawn.add_row(*map(escape, row))
    console.print(drawn)
    for line in verdict_lines(data):
        console.print(line, markup=False, soft_wrap=True)
    if skipped:
        console.print(
            f"skipped because of the budget of {budget}: {len(skipped)} runs"
            f" ({', '.join(start.name for start in skipped)}); repeat the command with a larger --budget",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"report: {directory.report_path}", markup=False, soft_wrap=True)
    return data


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """Treat SIGTERM like Ctrl-C, so that the current run saves a checkpoint first."""
    raise KeyboardInterrupt
