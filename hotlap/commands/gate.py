"""`hotlap race BASE IDEA --gate`: train rounds until it is decided whether the idea helps."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from typing import TYPE_CHECKING

from hotlap.errors import INTERRUPTED, ConfigError
from hotlap.progress import to_stderr
from hotlap.terminal import printable

if TYPE_CHECKING:
    from hotlap.cli import Parser
    from hotlap.race.plan import Plan

DEFAULT_MOST_SEEDS = 12
DEFAULT_ALPHA = 0.05
DEFAULT_LEAST_EFFECT = 0.005
ONLY_WITH_GATE = ("alpha", "least_effect", "first_seed", "json")


def add_options(parser: Parser) -> None:
    group = parser.add_argument_group("gate")
    group.add_argument(
        "--gate",
        action="store_true",
        help="stop as soon as it is decided whether the second recipe helps; exit code 0 helps, 1 does not,"
        " 3 undecided",
    )
    group.add_argument(
        "--alpha",
        type=float,
        metavar="P",
        help="largest expected share of false “helps” in the series of gates of this directory of runs"
        f" (default: {DEFAULT_ALPHA})",
    )
    group.add_argument(
        "--least-effect",
        type=float,
        metavar="X",
        help="smallest gain worth having, in bits per byte, or nats without a manifest"
        f" (default: {DEFAULT_LEAST_EFFECT})",
    )
    group.add_argument(
        "--first-seed", type=int, metavar="N", help="seeds start at N, to test an idea again on other seeds"
    )
    group.add_argument("--json", action="store_true", help="print the result as one JSON object")


def check_unused(args: argparse.Namespace) -> None:
    """Refuse the options of a gate in a race without --gate."""
    for name in ONLY_WITH_GATE:
        if getattr(args, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(expected=f"--gate with {option}", found="no --gate", do="add --gate")


def check_options(args: argparse.Namespace) -> None:
    if args.resume is not None:
        raise ConfigError(
            expected="--gate without --resume", found="both", do="repeat the gate's command: it goes on"
        )
    if len(args.recipes) != 2:
        raise ConfigError(
            expected="two recipes with --gate, a baseline and an idea",
            found=f"{len(args.recipes)}",
            do="write hotlap race BASE IDEA --gate",
        )
    if args.alpha is not None and not 0 < args.alpha < 0.5:
        raise ConfigError(expected="--alpha between 0 and 0.5", found=f"{args.alpha:g}", do="change it")
    if args.least_effect is not None and not 0 <= args.least_effect < float("inf"):
        raise ConfigError(
            expected="--least-effect of 0 or more", found=f"{args.least_effect:g}", do="change it"
        )
    if args.first_seed is not None and not 0 <= args.first_seed < 2**62:
        raise ConfigError(expected="--first-seed of 0 or more", found=str(args.first_seed), do="change it")


def run_gate(args: argparse.Namespace, plan: Plan, budget_s: float | None) -> int:
    from hotlap.commands.race import check_runs
    from hotlap.lab.gate import Gate, Question
    from hotlap.lab.ledger import Ledger
    from hotlap.race.directory import RaceDirectory
    from hotlap.race.engine import open_engine
    from hotlap.race.progress import RaceProgress
    from hotlap.runs.directory import check_name

    for start in plan.rounds()[0]:
        evaluation = plan.config(start).evaluation
        if evaluation.target_bpb is not None or evaluation.target_loss is not None:
            raise ConfigError(
                expected="a gate without a target, because it compares the ends of whole runs",
                found=f"{start.entry.label} with one",
                do="omit the target, or race without --gate",
            )
    question = Question(
        plan,
        alpha=DEFAULT_ALPHA if args.alpha is None else args.alpha,
        least_effect=DEFAULT_LEAST_EFFECT if args.least_effect is None else args.least_effect,
    )
    if args.name is not None:
        check_name(args.name)
    directory = RaceDirectory(args.runs / (args.name or question.default_name))
    check_runs(plan, directory, args.on)
    ledger = Ledger(args.runs)
    gate = Gate(question, directory, ledger, to_stderr)
    directory.check(plan)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with directory.lock(to_stderr) as lock:
            directory.check(plan)
            gate.begin()
            directory.write_plan(plan)
            to_stderr(f"gate: {plan.entries[1].label} against {plan.entries[0].label} in {directory.path}")
            done = sum(directory.is_over(start) for round_ in plan.rounds() for start in round_)
            with (
                RaceProgress(plan, done) as progress,
                open_engine(args.on, directory.path, lock, progress.say) as engine,
            ):
                result = gate.run(engine, progress, budget_s)
    except KeyboardInterrupt:
        to_stderr("gate: stopped; repeat the command to go on")
        return INTERRUPTED
    if args.json:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        sys.stdout.write(printable(f"{plan.entries[1].label}: {result['words']}") + "\n")
        sys.stdout.write(printable(f"report: {result['report']}") + "\n")
    return int(result["exit_code"])
