"""Shows how far a race is, on stderr: a bar and the runs that train on a terminal,
otherwise one line per run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self, TextIO

from hotlap.race.engine import Training
from hotlap.race.plan import Plan, Start

LINES_LEFT = 4  # of a terminal's height, for the bar and what was printed last


class Pace:
    """How many seconds a run of each label took; estimates the time that is left."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, start: Start, seconds: float) -> None:
        self._seconds[start.entry.label] = seconds

    def of(self, starts: list[Start]) -> float | None:
        """None before any run has ended; for a label that has not run yet, the mean of the others."""
        if not self._seconds:
            return None
        mean = sum(self._seconds.values()) / len(self._seconds)
        return sum(self._seconds.get(start.entry.label, mean) for start in starts)


class RaceProgress:
    """On a terminal:  race ━━━━━━━━━━╸━━━━━━━━━ 3 of 6 runs, about 0:04:10 left
                        45%  adamw, seed 1 on 3f2a91c0
    Elsewhere:         race: 3 of 6 runs; adamw, seed 1: finished, 1.4321 bits/byte; about 0:04:10 left
    """

    def __init__(self, plan: Plan, done: int, stream: TextIO | None = None) -> None:
        self.total = plan.seeds * len(plan.entries)
        self.done = done
        self.stream = sys.stderr if stream is None else stream
        self._bar = _Bar(self.total, self.stream) if self.stream.isatty() else None

    def training(self, runs: Sequence[Training], left_s: float | None) -> None:
        if self._bar is not None:
            text = f"{self.done} of {self.total} runs, {time_left(left_s)}"
            self._bar.show(self.done + sum(run.share for run in runs), text, runs)

    def ended(self, start: Start, how: str, left_s: float | None) -> None:
        self.done += 1
        self.say(f"race: {self.done} of {self.total} runs; {start}: {how}; {time_left(left_s)}")

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.print(line)
            return
        self.stream.write(line + "\n")
        self.stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def time_left(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    return f"about {timedelta(seconds=round(max(0.0, seconds)))} left"


class _Bar:
    """A bar of rich, with a line below it for each run that trains. Rich is imported only for a terminal."""

    def __init__(self, total: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn

        columns: list[Any] = [TextColumn("race"), BarColumn(), TextColumn("{task.description}", markup=False)]
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("", total=total)
        self._live = Live(self._progress, console=self._console, transient=True)
        self._live.start()

    def show(self, done: float, text: str, runs: Sequence[Training]) -> None:
        from rich.console import Group
        from rich.text import Text

        self._progress.update(self._task, completed=done, description=text)
        most = max(1, self._console.height - LINES_LEFT)
        lines = [
            Text(f" {run.share:4.0%}  {_place(run)}", no_wrap=True, overflow="ellipsis")
            for run in runs[:most]
        ]
        if len(runs) > most:
            lines.append(Text(f"       and {len(runs) - most} more"))
        self._live.update(Group(self._progress, *lines))

    def print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def _place(run: Training) -> str:
    return f"{run.task.title} on {run.machine}" if run.machine else run.task.title
