"""Carries out the plan of a race: one run after the other, each in its own `hotlap train` process.

One process per run, so that every run starts with the same clean memory, allocator and thread pool, its peak
memory is its own, and a crash ends only that run. A run that has ended is never repeated, not even if it
diverged; one that was killed resumes from its last checkpoint, or starts again if it has none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from hotlap.errors import RaceError
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import Plan, Start
from hotlap.race.progress import Pace, RaceProgress
from hotlap.runs.reader import status_of
from hotlap.settings import as_text

SECONDS_BETWEEN_LOOKS = 0.5
TAIL_BYTES = 4096  # read from the end of metrics.jsonl; longer than one line


class Runner:
    def __init__(self, plan: Plan, directory: RaceDirectory, lock: FileIO, progress: RaceProgress) -> None:
        self.plan = plan
        self.directory = directory
        self.progress = progress
        self.pace = Pace()
        self._lock = lock
        self._waiting = []
        for start in (start for round_ in plan.rounds() for start in round_):
            if directory.is_over(start):
                self.pace.add(start, float(self._summary_of(start)["seconds"]["total"]))
            else:
                self._waiting.append(start)

    def run(self, budget_s: float | None = None) -> list[Start]:
        """Run what has not ended yet; returns what the budget left out, in whole rounds after the first."""
        began = time.monotonic()
        for number, round_ in enumerate(self.plan.rounds()):
            starts = [start for start in round_ if start in self._waiting]
            needed_s = self.pace.of(starts)
            late = budget_s is not None and needed_s and time.monotonic() - began + needed_s > budget_s
            if number > 0 and late:
                break
            for start in starts:
                self._run(start)
        return self._waiting

    def _run(self, start: Start) -> None:
        began = time.monotonic()
        words = self._command(start)
        with self.directory.log(start).open("ab") as log, self._process(words, log) as process:
            while process.poll() is None:
                left = self.pace.of(self._waiting)
                elapsed = time.monotonic() - began
                self.progress.running(start, self._share(start), None if left is None else left - elapsed)
                try:
                    process.wait(SECONDS_BETWEEN_LOOKS)
                except subprocess.TimeoutExpired:
                    continue
        if not self.directory.is_over(start):
            raise self._failure(start, process.returncode)
        self._waiting.remove(start)
        self.pace.add(start, time.monotonic() - began)
        self.progress.ended(start, self._outcome(start), self.pace.of(self._waiting))

    def _command(self, start: Start) -> list[str]:
        run = self.directory.run(start)
        words = [sys.executable, "-m", "hotlap", "train"]
        words += ["--procs", str(self.plan.procs)] if self.plan.procs else []
        if run.path.exists():
            if _has_checkpoint(run.checkpoints):
                self.progress.say(f"race: {start}: resumes from its last checkpoint")
                return [*words, "--resume", str(run.path)]
            with run:
                run.lock()  # refused if another process trains in it
                shutil.rmtree(run.path)
            self.progress.say(f"race: {start}: starts again: it was killed before its first checkpoint")
        settings = {**self.plan.settings, **start.entry.changes, "seed": start.seed}
        words += [start.entry.recipe, "--size", self.plan.size]
        words += ["--runs", str(self.directory.path), "--name", start.name]
        return [*words, *(f"--{name}={as_text(value)}" for name, value in settings.items())]

    @contextmanager
    def _process(self, words: list[str], log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[self._lock.fileno()],
        )
        try:
            yield process
        except BaseException:
            process.terminate()  # the run saves a checkpoint and stops
            process.wait()
            raise

    def _failure(self, start: Start, code: int) -> RaceError:
        log = self.directory.log(start)
        lines = log.read_text(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        return RaceError(
            expected=f"{start} to finish",
            found=f"exit code {code} and `{said.strip()}`",
            do=f"see {log}; `hotlap race --resume {self.directory.path}` goes on",
        )

    def _outcome(self, start: Start) -> str:
        summary = self._summary_of(start)
        for field, unit in (("val_bpb", "bits/byte"), ("val_loss", "nats")):
            if summary.get(field) is not None:
                return f"{status_of(summary)}, {summary[field]:.4f} {unit}"
        return f"{status_of(summary)}, without a finite validation loss"

    def _summary_of(self, start: Start) -> dict[str, Any]:
        summary = self.directory.run(start).read_summary()
        assert summary is not None, "a run that has ended has a summary"
        return summary

    def _share(self, start: Start) -> float:
        """The fraction of a run that is done, by the last step in its metrics."""
        path = self.directory.run(start).metrics_path
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                steps = re.findall(rb'"step": (\d+),', file.read())
        except OSError:
            return 0.0
        return int(steps[-1]) / self.plan.config(start).schedule.steps if steps else 0.0


def _has_checkpoint(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    from hotlap.runs import checkpoint as store  # needs torch

    return bool(store.stored(directory))
