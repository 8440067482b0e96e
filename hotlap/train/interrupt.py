"""Ctrl-C and SIGTERM ask a run to stop after its step and save; a second Ctrl-C ends it at once."""

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
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            # Not sys.exit: a rank may be waiting in a collective that never returns.
            os._exit(INTERRUPTED)
        self.requested = True


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
