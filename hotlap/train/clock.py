"""The clock of a run: every second belongs to exactly one phase.

Only `training` counts as training time. Setup, compilation, validation and saving are timed
separately and reported next to it. On a GPU a phase ends when the device has finished.
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
        """Add the seconds per phase of earlier processes of the run."""
        for name, earlier in seconds.items():
            self.seconds[name] += earlier

    @property
    def total_s(self) -> float:
        """All seconds so far, of earlier processes too. Does not synchronize."""
        return sum(self.seconds.values()) + time.perf_counter() - self._since

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the `with` block as phase `name`, then switch back to the previous phase."""
        before = self._phase
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def switch(self, name: str) -> None:
        """End the current phase and start phase `name`. Synchronizes with the device."""
        assert name in self.seconds, f"unknown phase {name!r}, expected one of {PHASES}"
        self._wait_for_device()
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = name, now

    @property
    def training_s(self) -> float:
        """Seconds of training so far.

        Does not synchronize: on a GPU, queued work may still be running.
        """
        running = time.perf_counter() - self._since if self._phase == "training" else 0.0
        return self.seconds["training"] + running

    @property
    def other_s(self) -> dict[str, float]:
        """Seconds per phase other than training, up to the last switch."""
        return {name: seconds for name, seconds in self.seconds.items() if name != "training"}


def clock_for(device: torch.device) -> Clock:
    return Clock(wait_for(device))


def wait_for(device: torch.device) -> Callable[[], None]:
    """A function that returns when the device has finished all queued work."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return torch.mps.synchronize if device.type == "mps" else lambda: None
