"""One line at the bottom of a terminal that is rewritten in place, while other lines are printed above it.

The cursor waits at the start of the line. A terminal that becomes narrower wraps the line into the rows below
the cursor, which the next write erases with it: no resize leaves a part of the line behind.
"""

from __future__ import annotations

import time
from collections import deque
from typing import IO

ERASE = "\r\x1b[J"  # from the start of the line to the end of the screen
REWRITE_SECONDS = 0.1
SPEED_SECONDS = 60.0  # the time left follows from the speed over this last while
BARS = ("━", "─")
ASCII_BARS = ("#", "-")


class LiveLine:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._written_at = 0.0

    def show(self, text: str) -> None:
        """Replace the line, which must fit the terminal; not more often than the eye can follow."""
        if time.monotonic() - self._written_at >= REWRITE_SECONDS:
            self._write(f"{ERASE}{text}\r")

    def hide(self) -> None:
        """Before other lines are printed, and at the end."""
        if self._written_at:
            self._write(ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._written_at = time.monotonic()


class TimeLeft:
    """Seconds to the end of a task of `total` steps, by the speed of its last minute."""

    def __init__(self, total: int, done: int) -> None:
        self._total = total
        self._seen = deque([(time.monotonic(), done)])

    def after(self, done: int) -> float | None:
        """None while nothing is known of the speed."""
        now = time.monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > SPEED_SECONDS:
            self._seen.popleft()
        since, first = self._seen[0]
        return (now - since) / (done - first) * (self._total - done) if done > first else None


def fitted(columns: int, fraction: float, needed: list[str], wanted: list[str], *, ascii_only: bool) -> str:
    """A percentage, a bar, the needed parts, and as many of the wanted ones as leave the bar a fair width.

    The last column stays free: a terminal may wrap a line that fills it.
    """
    percent = f"{fraction:4.0%}"

    def bar_columns(parts: list[str]) -> int:
        return columns - 1 - len(percent) - 1 - sum(2 + len(part) for part in parts)

    parts = list(needed)
    for part in wanted:
        if bar_columns([*parts, part]) < 20:
            break
        parts.append(part)
    full, empty = ASCII_BARS if ascii_only else BARS
    width = max(0, min(40, bar_columns(parts)))
    done = round(width * fraction)
    line = f"{percent} {full * done}{empty * (width - done)}" + "".join(f"  {part}" for part in parts)
    return line[: columns - 1]


def duration(seconds: float | None) -> str:
    """As 0:59, 1:02:03, or --:-- if unknown."""
    if seconds is None:
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
