"""The process of one run: its command line, whether it is new, goes on or starts again; and how far it is."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hotlap.progress import Say
from hotlap.runs.directory import RunDirectory

TAIL_BYTES = 4096  # read from the end of metrics.jsonl; longer than one line


def train_command(path: Path, words: Sequence[str], procs: int | None, title: str, say: Say) -> list[str]:
    """The command that trains the run at `path`, which may have begun. Its words are those of a task.

    A run that has begun is resumed from its last checkpoint; without one its directory is removed.
    """
    command = [sys.executable, "-m", "hotlap", "train"]
    command += ["--procs", str(procs)] if procs else []
    run = RunDirectory(path)
    if path.exists():
        if has_checkpoint(run):
            say(f"race: {title}: resumes from its last checkpoint")
            return [*command, "--resume", str(path)]
        with run:
            run.lock()  # refused if another process trains in it
            shutil.rmtree(path)
        say(f"race: {title}: starts again: it was killed before its first checkpoint")
    return [*command, *words, "--runs", str(path.parent), "--name", path.name]


def has_checkpoint(run: RunDirectory) -> bool:
    if not run.checkpoints.is_dir():
        return False
    from hotlap.runs import checkpoint as store  # needs torch

    return bool(store.stored(run.checkpoints))


def share_done(metrics: Path, steps: int) -> float:
    """The fraction of a run's steps that is done, by the last step in its metrics."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            found = re.findall(rb'"step": (\d{1,18}),', file.read())
    except OSError:
        return 0.0
    return min(1.0, int(found[-1]) / steps) if found else 0.0
