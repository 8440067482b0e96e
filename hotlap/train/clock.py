"""Where the time goes: every second of a run belongs to exactly one phase.

Only `training` counts as training time; set-up, compilation, validation and saving are timed apart and
reported beside it. On a GPU a phase ends when the device is done, not when the work was queued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

PHASES = ("setup", "compile", "training", "validation", "saving")


class Clock:
    def __init__(self, wait_for_device: Callable[[], None] = lambda: None) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._wait_for_device = wait_for_device
        self._phase = "setup"
        self._since = time.perf_counter()

    def go_on_from(self, seconds: Mapping[str, float]) -> None:
        """Count on from what earlier processes of the run took."""
        for name, earlier in seconds.items():
            self.seconds[name] += earlier

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside to another phase; afterwards go back to the one before."""
        before = self._phase
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, name: str) -> None:
        assert name in self.seconds, f"{name} is none of the phases {PHASES}"
        self._wait_for_device()
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = name, now

    @property
    def training_s(self) -> float:
        """Seconds of training so far; on a GPU, what is queued may not be done yet."""
        running = time.perf_counter() - self._since if self._phase == "training" else 0.0
        return self.seconds["training"] + running

    @property
    def other_s(self) -> dict[str, float]:
        """Seconds of the phases besides training that are over."""
        return {name: seconds for name, seconds in self.seconds.items() if name != "training"}


def clock_for(device: torch.device) -> Clock:
    if device.type == "cuda":
        return Clock(lambda: torch.cuda.synchronize(device))
    if device.type == "mps":
        return Clock(torch.mps.synchronize)
    return Clock()
