"""Shows how far a race is, on stderr: a bar on a terminal, otherwise one line per run."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any, Self, TextIO

from hotlap.race.plan import Plan, Start


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
    """On a terminal:  race ━━━━━━━━━━╸━━━━━━━━━ 3 of 6 runs, adamw, seed 1, about 0:04:10 left
    Elsewhere:         race: 3 of 6 runs; adamw, seed 1: finished, 1.4321 bits/byte; about 0:04:10 left
    """

    def __init__(self, plan: Plan, done: int, stream: TextIO | None = None) -> None:
        self.total = plan.seeds * len(plan.entries)
        self.done = done
        self.stream = sys.stderr if stream is None else stream
        self._bar = _Bar(self.total, self.stream) if self.stream.isatty() else None

    def running(self, start: Start, share: float, left_s: float | None) -> None:
        """`share`: the fraction of this run that is done."""
        if self._bar is not None:
            text = f"{self.done} of {self.total} runs, {start}, {time_left(left_s)}"
            self._bar.show(self.done + share, text)

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
    """A bar of rich, which is imported only if stderr is a terminal."""

    def __init__(self, total: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns: list[Any] = [TextColumn("race"), BarColumn(), TextColumn("{task.description}", markup=False)]
        self._progress = Progress(*columns, console=Console(file=stream, highlight=False), transient=True)
        self._task = self._progress.add_task("", total=total)
        self._progress.start()

    def show(self, done: float, text: str) -> None:
        self._progress.update(self._task, completed=done, description=text)

    def print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()
