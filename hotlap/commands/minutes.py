"""`hotlap train --minutes M`: how many steps a recipe takes in that time, or, without one, the dial."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from hotlap.commands.own_data import with_data
from hotlap.config import Config
from hotlap.errors import ConfigError, DeviceError
from hotlap.recipes import check_used, find_recipe, resolve
from hotlap.settings import diff, updated

HELP = (
    "end after so many minutes, everything included; without a RECIPE, also choose the model, the batch and"
    " the schedule for that time and the text"
)
FEWEST_MINUTES = 0.5
# What the run itself takes before its first step and after its last: it builds the model, validates, samples.
AROUND_TRAINING_S = 4.0
LEAST_TRAINING = 0.2  # of the minutes, however long setting up has taken
SHAPE = {"model.width", "model.num_heads"}  # of which one must divide the other
VALIDATIONS = 10
VALIDATION_SHARE = 0.05

Say = Callable[[str], None]


def check_minutes(args: argparse.Namespace, changes: Mapping[str, Any]) -> None:
    """Refuse what contradicts --minutes, before anything is downloaded or measured."""
    if not (math.isfinite(args.minutes) and args.minutes >= FEWEST_MINUTES):
        raise ConfigError(
            expected=f"--minutes of at least {FEWEST_MINUTES:g}, of which some seconds are for setting up",
            found=f"{args.minutes:g}",
            do="give more time, or the number of steps: hotlap train sprint --steps 100",
        )
    for name in ("schedule.steps", "schedule.minutes"):
        if name in changes:
            option = "steps" if name == "schedule.steps" else name
            raise ConfigError(
                expected="--minutes, from which the number of steps follows, or --steps",
                found=f"--minutes {args.minutes:g} and --{option} {changes[name]}",
                do="leave one out",
            )
    if args.resume is not None:
        raise ConfigError(
            expected="--resume without --minutes: a resumed run keeps its plan",
            found=f"--minutes {args.minutes:g}",
            do="leave it out, or train for more steps with --steps N --allow-change",
        )
    if "RANK" in os.environ:
        raise ConfigError(
            expected="one process that measures this machine for --minutes",
            found=f"rank {os.environ['RANK']} of a launcher",
            do="use --procs on one machine, or give --schedule.minutes and --steps as a first guess",
        )
    if args.recipe is None and args.procs is not None:
        raise ConfigError(
            expected="a RECIPE with --procs: what --minutes chooses alone is for one process",
            found=f"--procs {args.procs} without a RECIPE",
            do="leave it out, or add a RECIPE",
        )
    if args.recipe is None and args.size is not None:
        raise ConfigError(
            expected="--minutes alone, which chooses the size as well, or with a RECIPE and --size",
            found=f"--size {args.size} without a RECIPE",
            do="leave it out, or add a RECIPE, such as sprint",
        )


def timed_config(
    args: argparse.Namespace, config: Config, changes: Mapping[str, Any], began: float
) -> Config:
    """`config` with the number of steps that it takes in `args.minutes` on this machine."""
    from hotlap.corpus.configured import data_directory, ensure_data
    from hotlap.dial.measure import seconds_per_step
    from hotlap.progress import to_stderr

    ensure_data(config, to_stderr)
    step_s = seconds_per_step(config, data_directory(config), find_recipe(args.recipe).ideas)
    return with_minutes(config, changes, args.minutes, step_s, began)


def dialed_config(args: argparse.Namespace, changes: Mapping[str, Any], began: float, say: Say) -> Config:
    """Model, batch, schedule and steps for `args.minutes` and the text, from measured laps."""
    from hotlap.corpus.configured import data_directory, ensure_data
    from hotlap.dial.choose import BASE, choose, described
    from hotlap.dial.measure import seconds_per_step
    from hotlap.dial.text import measure_text
    from hotlap.hardware import select_device
    from hotlap.progress import to_stderr

    device = select_device(changes.get("runtime.device", "auto"))
    if device.type != "cpu":
        raise DeviceError(
            expected="a CPU, on which the laps were measured that --minutes chooses from",
            found=f"{device.type}",
            do="add --device cpu, or name a RECIPE: hotlap train softcap --minutes M",
        )
    plain = resolve(*BASE, changes)
    check_used(plain, changes)
    base = with_data(plain, changes)
    ensure_data(base, to_stderr)
    directory = data_directory(base)
    text = measure_text(directory)
    base_step_s = seconds_per_step(base, directory)
    training_s = training_seconds(args.minutes, began)
    choice = choose(text, training_s / base_step_s)
    chosen = dict(choice.settings)
    if SHAPE & changes.keys():  # the chosen one may contradict what is given of it
        chosen = {name: value for name, value in chosen.items() if name not in SHAPE}
    of_data = {change.name: change.after for change in diff(plain, base)}
    config = updated(resolve(*BASE, {**chosen, **changes}), of_data)
    config = with_minutes(config, changes, args.minutes, choice.relative_step * base_step_s, began)
    for line in described(choice, text, config, args.minutes):
        say(line)
    return config


def training_seconds(minutes: float, began: float) -> float:
    """What is left for steps, of a command that began at `time.time()` = `began`."""
    left_s = 60 * minutes - (time.time() - began) - AROUND_TRAINING_S
    return max(left_s / (1 + VALIDATION_SHARE), LEAST_TRAINING * 60 * minutes)


def with_minutes(
    config: Config, changes: Mapping[str, Any], minutes: float, step_s: float, began: float
) -> Config:
    """With as many steps as there is time for, and validations that follow; `changes` are left alone."""
    from hotlap.train.pace import with_steps

    steps = max(1, round(training_seconds(minutes, began) / step_s))
    following = {
        "evaluation.every_steps": max(1, steps // VALIDATIONS),
        "evaluation.share": VALIDATION_SHARE,
    }
    given = {name: value for name, value in changes.items() if not name.startswith("data.")}
    return updated(with_steps(config, steps), {**following, **given, "schedule.minutes": minutes})
