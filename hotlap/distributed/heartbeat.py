"""Signs of life: names the rank that hangs, where a collective could only say that it waits.

A thread of every rank writes to the store of the process group a few times per time-out, and reads
what the other ranks have written. A rank that is silent for the time-out is stopped, frozen with its
machine, or cut off; the thread of every other rank then says so and ends its process, whose main
thread waits in a collective. A process that was stopped for that long does so itself when it goes on.

A store that cannot be reached says nothing about a rank: then the collective's own time-out decides.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch.distributed as dist

from hotlap.errors import SilentRankError, TrainingError

BEATS_PER_TIMEOUT = 10
LONGEST_PERIOD_S = 5.0
# A rank that is silent for so long when a collective fails is the reason; a busy one is not.
PERIODS_TO_BLAME = 3
DONE = "done"  # the last sign of a rank that has left the group


def period_of(timeout: timedelta) -> timedelta:
    """Between two signs of a rank; with the time-out, how long a silent rank may stay unnamed."""
    return min(timeout / BEATS_PER_TIMEOUT, timedelta(seconds=LONGEST_PERIOD_S))


class Store(Protocol):
    """What is needed of torch's stores, which it does not export to type checkers."""

    def set(self, key: str, value: str) -> None: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...


@dataclass
class Sign:
    """The last one of a rank."""

    text: str  # "count process host", or DONE
    # When it was read first, by this process's clock; later by all the time in which it heard nobody since.
    seen: float

    @property
    def place(self) -> str:
        _, process, host = self.text.split(" ", 2)
        return f"process {process} on {host}"


class Stall(NamedTuple):
    """A time in which the thread was to sleep for a period, and did not wake."""

    seconds: float
    until: float


class Heartbeat:
    """Signs of life of this rank, and those that it has seen of the others, while a `with` block is active.

    `on_silence` is called in the thread, with what to say. It has to end the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        on_silence: Callable[[TrainingError], None],
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self.period_s = period_of(timeout).total_seconds()
        self._store = store
        self._on_silence = on_silence
        self._others = [other for other in range(world_size) if other != rank]
        self._signs: dict[int, Sign] = {}
        self._sleeps_since = math.inf
        self._stall = Stall(0, 0)  # the last one of some length
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._beat(0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=self.period_s)

    def find_hanging(self) -> TrainingError | None:
        """What to say if this process was stopped, or another rank has been silent, for the time-out."""
        return self._find_silent(self.timeout.total_seconds())

    def find_culprit(self) -> TrainingError | None:
        """What to say if a collective has failed, and a rank that was silent is the reason."""
        return self._find_silent(PERIODS_TO_BLAME * self.period_s)

    def _find_silent(self, longest_s: float) -> TrainingError | None:
        now = time.monotonic()
        expected = f"a sign of life of every rank within {self.timeout.total_seconds() / 60:g} minutes"
        go_on = "continue from the last checkpoint with `--resume`"
        stalled_s = self._stalled_s(now)
        if stalled_s >= longest_s:
            return SilentRankError(
                expected=expected,
                found=f"rank {self.rank}, this process, stopped for {stalled_s:.0f} s",
                do=f"the other ranks have ended without it; {go_on}",
            )
        for rank, sign in self._signs.items():
            silent_s = now - sign.seen - self._stalling_s(now)
            if sign.text != DONE and silent_s >= longest_s:
                return SilentRankError(
                    expected=expected,
                    found=f"none of rank {rank} ({sign.place}) for {silent_s:.0f} s",
                    do=f"see whether it is stopped or cannot be reached; then {go_on}",
                )
        return None

    def _stalled_s(self, now: float) -> float:
        """How long this process has been stopped, if it has gone on only just; at least 0."""
        stall = self._stall if now - self._stall.until < PERIODS_TO_BLAME * self.period_s else Stall(0, 0)
        return max(stall.seconds, self._stalling_s(now))

    def _stalling_s(self, now: float) -> float:
        """How long this process has been stopped, if the thread has not noticed yet; at least 0."""
        return max(0, now - self._sleeps_since - self.period_s)

    def _run(self) -> None:
        count = 0
        try:
            while not self._pause():
                error = self.find_hanging()
                if error is None:
                    count += 1
                    self._beat(count)
                    self._listen()
                    error = self.find_hanging()
                if error is not None:
                    self._on_silence(error)
                    return
            self._store.set(self._key(self.rank), DONE)
        except dist.DistError:
            return  # nothing follows from a store that does not answer

    def _pause(self) -> bool:
        """Sleep for a period. Returns whether the block has been left."""
        self._sleeps_since = time.monotonic()
        ended = self._ended.wait(self.period_s)
        now = time.monotonic()
        stalled_s = self._stalling_s(now)
        if stalled_s > self.period_s:
            self._stall = Stall(stalled_s, now)
            self._forgive(stalled_s)
        self._sleeps_since = math.inf
        return ended

    def _beat(self, count: int) -> None:
        self._store.set(self._key(self.rank), f"{count} {os.getpid()} {socket.gethostname()}")

    def _listen(self) -> None:
        asked = time.monotonic()
        texts = self._store.multi_get([self._key(rank) for rank in self._others])
        now = time.monotonic()
        self._forgive(now - asked)
        for rank, text in zip(self._others, (text.decode() for text in texts), strict=True):
            if rank not in self._signs or self._signs[rank].text != text:
                self._signs[rank] = Sign(text, now)

    def _forgive(self, deaf_s: float) -> None:
        """Do not count the time in which nobody could be heard."""
        for sign in self._signs.values():
            sign.seen += deaf_s

    @staticmethod
    def _key(rank: int) -> str:
        return f"rank {rank}"
