"""`hotlap train RECIPE`: resolves the configuration, trains, and prints a table of the results."""

from __future__ import annotations

import argparse
import functools
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from hotlap.cli import Parser
from hotlap.commands import minutes, own_data
from hotlap.commands.dry_run import estimate_lines, print_config
from hotlap.commands.own_data import with_data, with_source
from hotlap.commands.results import finish
from hotlap.commands.resume import (
    AUTO,
    NEWEST_RUN,
    ResumePoint,
    find_resume_point,
    goes_on_by_itself,
    has_checkpoint,
    ideas_of,
    over_line,
    resumed_config,
)
from hotlap.config import Config
from hotlap.errors import BUG, INTERRUPTED, PREEMPTED, ConfigError, HotlapError, memory_errors
from hotlap.progress import silent
from hotlap.recipes import SIZES, check_used, find_recipe, resolve
from hotlap.settings import (
    as_text,
    describe_type,
    flatten,
    parse,
    settings_of,
    shown,
)
from hotlap.terminal import make_console
from hotlap.versions import commit_of, replace_process, split_version

# When the command was given that started this process as one of several, as `time.time()`.
BEGAN_VARIABLE = "HOTLAP_BEGAN"

if TYPE_CHECKING:
    from hotlap.train.run import RunOptions


def configure(parser: Parser) -> None:
    from hotlap.runs.trackers import TRACKERS

    parser.takes_settings = True
    parser.usage = "hotlap train RECIPE|--minutes M [options] [--SETTING VALUE …]"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="see `hotlap recipes`")
    parser.add_argument("--size", help=f"one of {', '.join(SIZES)} (default: nano on a CPU, small on CUDA)")
    parser.add_argument("--data", metavar="PATH|CORPUS", help=own_data.HELP)
    parser.add_argument("--minutes", type=float, metavar="M", help=minutes.HELP)
    parser.add_argument("--name", help="name of the run's directory (default: RECIPE-SIZE-number)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="directory of all runs (default: runs)"
    )
    parser.add_argument("--procs", type=int, help="number of processes on this machine")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=NEWEST_RUN,
        metavar="PATH|auto",
        help="resume from a run's last checkpoint, or from the checkpoint at PATH (default: the newest run);"
        " auto: start the run --name, or resume it if it exists",
    )
    parser.add_argument("--allow-change", action="store_true", help="resume with other settings")
    parser.add_argument("--fallback", action="store_true", help="skip damaged checkpoints when resuming")
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="TRACKER",
        help=f"also log to {', '.join(TRACKERS)} (docs/tracking.md); may be repeated",
    )
    parser.add_argument("--verbose", action="store_true", help="list every parameter with its optimizer")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the configuration and an estimate, and stop"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    settings = "\n".join(f"  --{s.name}  {s.doc} ({describe_type(s.type)})" for s in settings_of(Config))
    parser.epilog = f"settings (the last part of a name is enough if it is unique):\n{settings}"


def run(args: argparse.Namespace) -> int:
    if "RANK" in os.environ:
        from hotlap.distributed.launch import LAUNCHER_VARIABLE
        from hotlap.distributed.leaving import leave_at_once, stop_with_parent

        launcher = os.environ.get(LAUNCHER_VARIABLE)
        if launcher is not None and not stop_with_parent(int(launcher)):
            leave_at_once(PREEMPTED)
        leave_at_once(exit_code(lambda: train(args)))
    return train(args)


def train(args: argparse.Namespace) -> int:
    recipe, version = split_version(args.recipe or "")
    if version is not None:
        find_recipe(recipe)
        words = [recipe if word == args.recipe else word for word in args.words]
        replace_process(commit_of(version), ["train", *words])
    console, began = make_console(), float(os.environ.get(BEGAN_VARIABLE, time.time()))
    changes = with_source(parse(Config, args.settings), args.data)
    check_options(args, changes)
    goes_on = goes_on_by_itself(args)
    if args.resume == AUTO:
        args.resume = None
    if goes_on and has_checkpoint(args.runs / args.name):
        args.resume = NEWEST_RUN
    if args.resume is not None:
        point = find_resume_point(args, console)
        config = resumed_config(args, changes, point)
        root, name = point.directory.parent, point.directory.name
        ideas = ideas_of(args, config, point.directory)
    else:
        point, config = None, new_config(args, changes, console, began, is_new=not goes_on)
        ideas = find_recipe(config.recipe).ideas if args.recipe is None else find_recipe(args.recipe).ideas
        root, name = args.runs, args.name
    if args.dry_run:
        print_config(console, config, as_json=args.json)
        if not args.json:
            for line in estimate_lines(config, args.procs or 1):
                console.print(line, markup=False, soft_wrap=True)
        return 0
    if point is not None and point.is_over(config):
        console.print(over_line(point), markup=False, soft_wrap=True)
        return 0
    if args.procs is not None:
        train_in_processes(args, config, point, console, began)
    from hotlap.train.run import RunOptions

    options = RunOptions(
        root, name, trackers=args.log, starts_over=goes_on, ideas=ideas, verbose=args.verbose, began=began
    )
    if point is not None:
        options = replace(
            options, resume_from=point.checkpoint, newest_step=point.newest_step, starts_over=False
        )
    return train_here(config, options, console)


def check_options(args: argparse.Namespace, changes: dict[str, Any]) -> None:
    """Refuse options that would have no effect."""
    for name in ("recipe", "ideas"):
        if name in changes:
            raise ConfigError(
                expected="the recipe as the first argument",
                found=f"--{name} {shown(changes[name])}",
                do=f"write it without --{name}",
            )
    needed = {"json": "dry_run", "allow_change": "resume", "fallback": "resume"}
    for option, with_option in needed.items():
        if getattr(args, option) and not getattr(args, with_option):
            raise ConfigError(
                expected=f"--{option.replace('_', '-')} together with --{with_option.replace('_', '-')}",
                found="only the first",
                do="add the second, or leave out the first",
            )
    if args.minutes is not None:
        minutes.check_minutes(args, changes)
    if args.resume is None:
        return
    if args.resume == AUTO and (args.name is None or args.recipe is None):
        raise ConfigError(
            expected="a RECIPE and --name with --resume auto, so that each start finds the same run",
            found="no --name" if args.name is None else "no RECIPE",
            do="add it",
        )
    if args.name is not None and args.resume not in (NEWEST_RUN, AUTO):
        raise ConfigError(
            expected="one run to resume",
            found=f"--resume {args.resume} and --name {args.name}",
            do="leave out --name or the path: a resumed run keeps its name",
        )
    if args.size is not None and args.recipe is None:
        raise ConfigError(
            expected="--size together with a RECIPE",
            found=f"--size {args.size} alone: the run keeps its recipe and its size",
            do="leave it out",
        )


def new_config(
    args: argparse.Namespace, changes: dict[str, Any], console: Console, began: float, *, is_new: bool = True
) -> Config:
    if args.recipe is None and args.minutes is None:
        raise ConfigError(
            expected="a RECIPE, or --minutes M, which chooses the rest",
            found="neither",
            do="`hotlap train --minutes 2` trains on the default corpus, `hotlap recipes` lists all recipes",
        )
    if args.name is not None and is_new:
        check_new_name(args.runs, args.name)
    if args.recipe is None:
        say = silent if args.json else functools.partial(console.print, markup=False, soft_wrap=True)
        return minutes.dialed_config(args, changes, began, say)
    find_recipe(args.recipe)
    size = args.size or default_size(changes.get("runtime.device", "auto"))
    config = resolve(args.recipe, size, changes)
    check_used(config, changes)
    config = with_data(config, changes)
    return config if args.minutes is None else minutes.timed_config(args, config, changes, began)


def check_new_name(runs: Path, name: str) -> None:
    from hotlap.runs.directory import check_name

    check_name(name)
    if (runs / name).exists():
        raise ConfigError(
            expected=f"a new run name in {runs}",
            found=f"`{name}`, which exists",
            do="choose another name, or continue that run with --resume",
        )


def default_size(device: str) -> str:
    from hotlap.hardware import select_device

    return "small" if select_device(device).type == "cuda" else "nano"


def train_in_processes(
    args: argparse.Namespace, config: Config, point: ResumePoint | None, console: Console, began: float
) -> NoReturn:
    from hotlap.corpus.configured import ensure_data
    from hotlap.distributed.launch import launch
    from hotlap.distributed.leaving import leave_at_once
    from hotlap.distributed.process_group import check_slurm_tasks
    from hotlap.hardware import select_device
    from hotlap.runs.trackers import check_trackers
    from hotlap.train.run import check_ranks, check_reduction

    if args.procs < 1:
        raise ConfigError(expected="--procs of 1 or more", found=str(args.procs), do="give a positive number")
    device = select_device(config.runtime.device)
    check_slurm_tasks(os.environ)
    check_ranks(config, args.procs)
    check_reduction(config, device, args.procs)
    check_trackers(args.log)
    # Before the ranks start: a download may take longer than they wait for each other.
    ensure_data(config, console.print)
    os.environ[BEGAN_VARIABLE] = str(began)
    leave_at_once(exit_code(lambda: launch(args.procs, words_of_rank(args, config, point))))


def words_of_rank(args: argparse.Namespace, config: Config, point: ResumePoint | None) -> list[str]:
    """The arguments of `hotlap` in each process."""
    words = without_option(without_option(args.words, "--procs"), "--minutes")
    if args.minutes is not None:  # what was measured, once for all
        names = ("schedule.minutes", "schedule.steps", "evaluation.every_steps", "evaluation.share")
        settings, given = flatten(config), parse(Config, args.settings)
        words += [f"--{name}={as_text(settings[name])}" for name in names if name not in given]
    if args.resume == NEWEST_RUN and args.name is None:
        assert point is not None, "--resume has found a run"
        # By its path: another run may be the newest when the ranks start.
        words.remove("--resume")
        words.append(f"--resume={point.directory}")
    return ["train", *words]


def without_option(words: Sequence[str], option: str) -> list[str]:
    """Without an option and its value, in either form."""
    kept = [word for word in words if not word.startswith(f"{option}=")]
    if option in kept:
        at = kept.index(option)
        del kept[at : at + 2]
    return kept


def exit_code(work: Callable[[], int]) -> int:
    """The exit code of a process that ends by `leave_at_once`; errors are printed here, not raised."""
    from hotlap.distributed.leaving import leave_with

    try:
        with memory_errors():
            return work()
    except HotlapError as mistake:
        leave_with(mistake)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException:
        traceback.print_exc()
        return BUG


def train_here(config: Config, options: RunOptions, console: Console) -> int:
    from hotlap.train.run import run as run_training

    result = run_training(config, options, console)
    if result.directory is None:
        return 0
    if result.status == "interrupted":
        logged = "".join(f" --log {name}" for name in options.trackers)
        console.print(
            f"stopped at step {result.summary['steps']} and saved; resume with:"
            f" hotlap train --resume {result.directory.path}{logged}",
            soft_wrap=True,
        )
        return result.exit_code
    finish(result, result.directory, console)
    if config.schedule.minutes and options.began is not None:
        took_s = time.time() - options.began
        console.print(f"time: {took_s:.1f} s of {60 * config.schedule.minutes:g} s")
    return 0
