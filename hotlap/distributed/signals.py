"""Ctrl-C, SIGTERM and a closed terminal ask a run to stop after its step and save; a second Ctrl-C ends it
at once. A second SIGTERM does not: a race that is interrupted sends one after the terminal's Ctrl-C.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Self

from hotlap.errors import INTERRUPTED


class StopRequest:
    """Within a `with`, signals set `requested` instead of ending the process."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            # Not sys.exit: a rank may be waiting in a collective that never returns.
            os._exit(INTERRUPTED)
        self.requested = True


def stop_signals() -> list[signal.Signals]:
    """Those that ask to stop. With nohup a closed terminal does not."""
    closed_terminal = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *closed_terminal]
