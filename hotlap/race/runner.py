"""Carries out the plan of a race on an engine, in rounds, within a budget.

A run that has ended is never repeated, not even if it diverged; one that was killed resumes from its last
checkpoint, or starts again if it has none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hotlap.errors import RaceError
from hotlap.race.directory import RaceDirectory
from hotlap.race.engine import Ended, Engine, Task, carry_out
from hotlap.race.plan import Plan, Start
from hotlap.race.progress import Pace, RaceProgress
from hotlap.runs.reader import status_of


class Runner:
    def __init__(self, plan: Plan, directory: RaceDirectory, engine: Engine, progress: RaceProgress) -> None:
        self.plan = plan
        self.directory = directory
        self.engine = engine
        self.progress = progress
        self.pace = Pace()
        self._waiting: list[Start] = []
        for start in (start for round_ in plan.rounds() for start in round_):
            if directory.is_over(start):
                self.pace.add(start, float(self._summary_of(start)["seconds"]["total"]))
            else:
                self._waiting.append(start)
        self._start_at: dict[Path, Start] = {directory.run(start).path: start for start in self._waiting}
        engine.find([self._task(start) for start in self._waiting])

    def run(self, budget_s: float | None = None) -> list[Start]:
        """Run what has not ended yet; returns what the budget left out, in whole rounds after the first."""
        first, *others = self._rounds()
        if budget_s is None:
            self.carry_out(start for round_ in (first, *others) for start in round_)
        else:
            began = time.monotonic()
            self.carry_out(first)  # tells how long a round takes
            self.carry_out(self._within(others, began + budget_s))
        return self._waiting

    def _rounds(self) -> list[list[Start]]:
        """The plan's rounds. If runs train at the same time, each round begins with another recipe.

        Otherwise, of two recipes on two machines, each would meet the same machine in every round.
        """
        turns = len(self.plan.entries) if self.engine.slots > 1 else 1
        return [
            round_[number % turns :] + round_[: number % turns]
            for number, round_ in enumerate(self.plan.rounds())
        ]

    def carry_out(self, starts: Iterable[Start]) -> None:
        """Run those of `starts` that have not ended yet, and return when they have."""
        tasks = (self._task(start) for start in starts if start in self._waiting)
        for ended in carry_out(self.engine, tasks, self._show):
            self._end(ended)

    def _within(self, rounds: Iterable[Sequence[Start]], deadline: float) -> Iterator[Start]:
        """The runs of these rounds, as long as the next round will have ended at the deadline."""
        for round_ in rounds:
            starts = [start for start in round_ if start in self._waiting]
            if starts and time.monotonic() + self._needed_s(starts) > deadline:
                return
            yield from starts

    def _needed_s(self, starts: Sequence[Start]) -> float:
        """When these runs will have ended if they are started after those that train."""
        longest = max(self.pace.of([start]) or 0.0 for start in starts)
        return max(longest, (self._work_s(starts) or 0.0) / self.engine.slots)

    def _work_s(self, starts: Sequence[Start]) -> float | None:
        """Seconds of training that are left in these runs and those that train; None if nobody knows."""
        shares = {one.task.path: one.share for one in self.engine.training()}
        unfinished = [self._start_at[path] for path in shares]
        unfinished += [start for start in starts if self.directory.run(start).path not in shares]
        work_s = 0.0
        for start in unfinished:
            seconds = self.pace.of([start])
            if seconds is None:
                return None
            work_s += seconds * (1 - shares.get(self.directory.run(start).path, 0.0))
        return work_s

    def _left_s(self) -> float | None:
        work = self._work_s(self._waiting)
        return None if work is None else work / min(self.engine.slots, max(1, len(self._waiting)))

    def _show(self) -> None:
        self.progress.training(self.engine.training(), self._left_s())

    def _task(self, start: Start) -> Task:
        return Task(
            title=str(start),
            path=self.directory.run(start).path,
            log=self.directory.log(start),
            words=tuple(self.plan.words(start, self.directory.ideas)),
            config=self.plan.config(start),
            procs=self.plan.procs,
        )

    def _end(self, ended: Ended) -> None:
        start = self._start_at[ended.task.path]
        if not self.directory.is_over(start):
            raise self._failure(start, ended.exit_code)
        self._waiting.remove(start)
        self.pace.add(start, ended.seconds)
        self.progress.ended(start, self._outcome(start), self._left_s())

    def _failure(self, start: Start, code: int) -> RaceError:
        log = self.directory.log(start)
        lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
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
