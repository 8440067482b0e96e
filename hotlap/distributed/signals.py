"""Stop requests. Ctrl-C, SIGTERM or SIGHUP makes a run finish its step, save and stop.

A second Ctrl-C exits immediately. A second SIGTERM does not: an interrupted race sends SIGTERM
after the terminal has sent Ctrl-C.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Self

from hotlap.errors import INTERRUPTED, PREEMPTED


class StopRequest:
    """Inside the `with` block, stop signals set `requested` instead of ending the process."""

    def __init__(self) -> None:
        self.requested = False
        # Another rank may have been asked to stop instead of this one: not by Ctrl-C, which reaches all.
        self.exit_code = PREEMPTED

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            # Not sys.exit, because the rank may be blocked in a collective that never returns.
            os._exit(INTERRUPTED)
        self.requested = True
        self.exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED


def stop_signals() -> list[signal.Signals]:
    """SIGINT, SIGTERM and SIGHUP. SIGHUP is left out if it is ignored, as under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]
