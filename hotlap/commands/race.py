"""`hotlap race RECIPE…`: recipes and variants over seeds, in turn, and whether a difference is luck."""

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
from hotlap.commands.train import default_size
from hotlap.config import Config
from hotlap.errors import INTERRUPTED, ConfigError
from hotlap.progress import to_stderr
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
        help="a recipe, or a variant of it such as softcap:optim.muon.lr=0.03; the first is compared with",
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with the race in DIR")
    add_options(parser)


def add_options(parser: Parser) -> None:
    """What `race` and `ablate` have in common."""
    parser.takes_settings = True
    parser.add_argument("--size", help=f"one of {', '.join(SIZES)} (default: nano on a CPU, small on CUDA)")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs of each (default: {DEFAULT_SEEDS})")
    parser.add_argument("--budget", metavar="TIME", help="start no round that would end later, such as 10m")
    parser.add_argument("--name", help="of the race's directory (default: made from the plan)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where race directories are")
    parser.add_argument("--procs", type=int, help="train each run in so many processes")
    parser.epilog = (
        "Settings, such as --target-bpb 1.5 or --steps 200, hold for every run; `hotlap train --help` lists"
        " them.\nThe same command again goes on where a race was stopped."
    )


def run(args: argparse.Namespace) -> int:
    from hotlap.race.directory import RaceDirectory
    from hotlap.race.plan import make_plan, parse_spec

    if args.resume is None:
        for spec in args.recipes:
            parse_spec(
                spec
            )  # torch, which knows the default size, takes seconds: mistakes are answered first
        size, seeds, settings = common_options(args)
        plan = make_plan(args.recipes, size, seeds, settings, args.procs)
        return carry_out(plan, race_directory(args, plan), args.budget)
    given = [*args.recipes, *(f"--{name}" for name in args.settings)]
    given += [f"--{name}" for name in ("size", "seeds", "procs", "name") if getattr(args, name) is not None]
    if given:
        raise ConfigError(expected="--resume DIR alone", found=" ".join(given), do="leave them out")
    directory = RaceDirectory(args.resume)
    return carry_out(directory.read_plan(), directory, args.budget)


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


def carry_out(plan: Plan, directory: RaceDirectory, budget: str | None, notes: Sequence[str] = ()) -> int:
    """Run what is not over yet, and say what it shows."""
    from hotlap.race.progress import RaceProgress
    from hotlap.race.runner import Runner
    from hotlap.train.run import check_ranks

    for start in plan.rounds()[0]:
        check_ranks(plan.config(start), plan.procs or 1)
    budget_s = None if budget is None else parse_seconds(budget)
    directory.check(plan)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with directory.lock(to_stderr) as lock:
            directory.check(plan)
            directory.write_plan(plan)
            for line in (*opening_lines(plan, directory), *notes):
                to_stderr(line)
            done = sum(directory.is_over(start) for round_ in plan.rounds() for start in round_)
            with RaceProgress(plan, done) as progress:
                left_out = Runner(plan, directory, lock, progress).run(budget_s)
    except KeyboardInterrupt:
        to_stderr(f"race: stopped; go on with: hotlap race --resume {directory.path}")
        return INTERRUPTED
    show(plan, directory, left_out, budget, make_console())
    return 0


def parse_seconds(text: str) -> float:
    """`90s`, `10m`, `1h30m`."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if not match or not any(map(int, match.groups(default="0"))):
        raise ConfigError(
            expected="a time such as 90s, 10m or 1h30m as --budget", found=f"`{text}`", do="write it so"
        )
    return sum(int(number or 0) * unit for number, unit in zip(match.groups(), SECONDS.values(), strict=True))


def opening_lines(plan: Plan, directory: RaceDirectory) -> list[str]:
    lines = [f"race: {len(plan.entries)} × {plan.seeds} seeds at {plan.size} in {directory.path}"]
    lines += [
        f"race: {entry.label} has the settings of an earlier one, and its own seeds from {entry.first_seed}"
        for entry in plan.entries
        if entry.first_seed
    ]
    return lines


def show(
    plan: Plan, directory: RaceDirectory, left_out: Sequence[Start], budget: str | None, console: Console
) -> None:
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
    if left_out:
        console.print(
            f"left out by the budget of {budget}: {len(left_out)} runs"
            f" ({', '.join(start.name for start in left_out)}); the same command with more time runs them",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"report: {directory.report_path}", markup=False, soft_wrap=True)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """A terminated race ends as an interrupted one: its run saves first."""
    raise KeyboardInterrupt
