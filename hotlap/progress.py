"""Shows how far a long task is: a bar on a terminal, otherwise a line every few seconds.

Everything goes to standard error, so that standard output contains only the results of a command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from hotlap.terminal import printable

Say = Callable[[str], None]

SECONDS_BETWEEN_LINES = 5.0


def silent(line: str) -> None:
    """Print nothing."""
    del line


def to_stderr(line: str) -> None:
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


class ByteProgress:
    """Shows the bytes done out of a total, which may be an estimate.

    On a terminal:  tokenizing ━━━━━━━━━━━╸━━━━━━━ 512 MB of about 1024 MB, 21.3 MB/s, 0:00:24 left
    Elsewhere:      tokenizing: 512 MB of about 1024 MB (50 %), 21.3 MB/s
    """

    def __init__(self, task: str, total_bytes: int, stream: TextIO | None = None) -> None:
        self.task = task
        self.total_bytes = max(total_bytes, 1)
        self.done_bytes = 0
        self.stream = sys.stderr if stream is None else stream
        self._started = self._last_line = time.monotonic()
        self._bar = _Bar(task, self.total_bytes, self.stream) if self.stream.isatty() else None

    def advance_to(self, done_bytes: int) -> None:
        self.done_bytes = done_bytes
        if self._bar is not None:
            self._bar.show(done_bytes, f"{self._amounts()}, {self._speed()},")
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            percent = min(100, round(100 * done_bytes / self.total_bytes))
            self.stream.write(f"{self.task}: {self._amounts()} ({percent} %), {self._speed()}\n")
            self.stream.flush()

    def _amounts(self) -> str:
        return f"{self.done_bytes / 1e6:.0f} MB of about {self.total_bytes / 1e6:.0f} MB"

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self.done_bytes / 1e6 / seconds:.1f} MB/s"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            self.stream.write(f"{self.task}: {self.done_bytes / 1e6:.1f} MB, {self._speed()}\n")
            self.stream.flush()


class _Bar:
    """A bar of rich, which is imported only if stderr is a terminal."""

    def __init__(self, task: str, total_bytes: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amounts]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._progress.add_task(task, total=total_bytes, amounts="")
        self._progress.start()

    def show(self, done_bytes: int, amounts: str) -> None:
        self._progress.update(self._task, completed=done_bytes, amounts=amounts)

    def close(self) -> None:
        self._progress.stop()
