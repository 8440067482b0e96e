"""`hotlap train --resume`: finds the run and the checkpoint, and the configuration to go on with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from hotlap.commands.own_data import with_data
from hotlap.config import Config
from hotlap.errors import CheckpointError, ConfigError
from hotlap.recipes import IdeaFile, check_used, find_recipe, resolve, with_what_follows
from hotlap.recipes.idea_files import read_copies
from hotlap.settings import diff, from_json, shown, updated

if TYPE_CHECKING:
    from hotlap.runs.checkpoint import Checkpoint

NEWEST_RUN = "the newest run"
AUTO = "auto"
NO_RUN_ID = "none"  # torchrun's, unless it was given one or has a rendezvous


class ResumePoint(NamedTuple):
    directory: Path  # of the run
    checkpoint: Checkpoint
    # The step of the run's newest checkpoint; None if the user named a checkpoint, whatever came after it.
    newest_step: int | None

    @property
    def saved_config(self) -> Config:
        return from_json(Config, self.checkpoint.state.get("config"))

    def is_over(self, config: Config) -> bool:
        """Whether the run is complete, and `config` does not ask for more."""
        from hotlap.runs.reader import RunFiles, RunStatus

        if self.checkpoint.step != self.newest_step or config != self.saved_config:
            return False
        status = RunFiles(self.directory).read_status()
        # A run that diverged before its last step may be tried again.
        did_all_steps = status.is_final and self.checkpoint.step == config.schedule.steps
        return did_all_steps or status in (RunStatus.TARGET, RunStatus.PATIENCE)


def find_resume_point(args: argparse.Namespace, console: Console) -> ResumePoint:
    from hotlap.runs import checkpoint as store
    from hotlap.runs.directory import RunDirectory

    if args.resume != NEWEST_RUN:
        path = Path(args.resume)
    elif args.name is not None:
        path = args.runs / args.name
    else:
        path = newest_run(args.runs)
    if path.parent.name == "checkpoints":
        return ResumePoint(path.parent.parent, store.load(path), None)
    directory = RunDirectory.open(path)
    newest_step = max(store.stored(directory.checkpoints), default=None)
    checkpoint, skipped = store.load_latest(directory.checkpoints, fallback=args.fallback)
    for damage in skipped:
        console.print(f"skipped: {damage}", markup=False, soft_wrap=True)
    return ResumePoint(path, checkpoint, newest_step)


def goes_on_by_itself(args: argparse.Namespace) -> bool:
    """Whether the command is for a run that exists, although it may be the one that started it."""
    if args.name is None:
        return False
    run = args.runs / args.name
    return run.exists() if args.resume == AUTO else args.resume is None and is_restart_of(run)


def is_restart_of(run: Path) -> bool:
    """Whether `torchrun --max-restarts` has started this process again, and the run is its own.

    A run of the same name that was there before must not be taken over: it is refused at the first start,
    after which torchrun tries again.
    """
    from hotlap.runs.reader import RunFiles

    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    files = RunFiles(run)
    if not count.isdecimal() or int(count) == 0 or not files.environment_path.is_file():
        return False
    environment = files.read_environment()
    own_id = os.environ.get("TORCHELASTIC_RUN_ID", NO_RUN_ID)
    if own_id != NO_RUN_ID:
        return (environment.get("variables") or {}).get("TORCHELASTIC_RUN_ID") == own_id
    return launcher_started() <= started_at(environment)


def launcher_started() -> float:
    """When torchrun's process on this node, the parent of this one, was started; seconds since 1970."""
    import psutil

    return psutil.Process(os.getppid()).create_time()


def started_at(environment: Mapping[str, Any]) -> float:
    """When the run's last process was started, to the next second; 0 if that is not recorded."""
    try:
        return datetime.fromisoformat(str(environment.get("started"))).timestamp() + 1
    except ValueError:
        return 0.0


def has_checkpoint(run: Path) -> bool:
    from hotlap.runs import checkpoint as store
    from hotlap.runs.reader import RunFiles

    return bool(store.stored(RunFiles(run).checkpoints))


def newest_run(runs: Path) -> Path:
    """The run that trained last, by its metrics; a report may have been written later."""
    found = [path.parent for path in runs.glob("*/config.json")]
    if not found:
        raise CheckpointError(
            expected=f"a run in {runs}", found="none", do="start one with `hotlap train RECIPE`"
        )
    return max(found, key=_trained_at)


def _trained_at(run: Path) -> float:
    written = (run / "metrics.jsonl", run / "config.json")
    return max(path.stat().st_mtime for path in written if path.exists())


def resumed_config(args: argparse.Namespace, changes: dict[str, Any], point: ResumePoint) -> Config:
    """The checkpoint's configuration with the given settings; any difference needs --allow-change."""
    saved, step = point.saved_config, point.checkpoint.step
    if args.recipe is None:
        config = updated(saved, with_what_follows(changes))
    else:
        config = resolve(args.recipe, args.size or saved.size, changes)
    check_used(config, changes)
    config = with_data(config, changes)
    if config.schedule.steps < step:
        raise ConfigError(
            expected=f"at least the {step} steps that the checkpoint has done",
            found=f"schedule.steps = {config.schedule.steps}",
            do="train for more steps, or resume from an earlier checkpoint",
        )
    differences = diff(saved, config)
    if args.recipe is not None and saved.ideas != config.ideas and not args.allow_change:
        raise ConfigError(
            expected=f"{args.recipe} as it was when {point.directory} was started, {shown(saved.ideas)}",
            found=f"{shown(config.ideas)}",
            do="leave it out to go on with the run's own copy, or add --allow-change",
        )
    if differences and not args.allow_change:
        listed = ", ".join(f"{c.name} {shown(c.before)} → {shown(c.after)}" for c in differences)
        raise ConfigError(
            expected="the configuration that the run was started with",
            found=f"changed {listed}",
            do="leave them out, or add --allow-change",
        )
    return config


def ideas_of(args: argparse.Namespace, config: Config, run: Path) -> tuple[IdeaFile, ...]:
    """The ideas of a run that is resumed: its own copies, or those given with --allow-change."""
    from hotlap.runs.reader import RunFiles

    if args.recipe is not None and args.allow_change:
        return find_recipe(args.recipe).ideas
    return read_copies(RunFiles(run).ideas, config.ideas)


def over_line(point: ResumePoint) -> str:
    return (
        f"{point.directory} is over: step {point.checkpoint.step} of"
        f" {point.saved_config.schedule.steps}; nothing to do (more: --steps N --allow-change)"
    )
