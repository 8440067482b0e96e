"""Trains runs on this machine, each in its own `hotlap train` process; one after the other by default.

One process per run, so that every run starts with the same clean memory, allocator and thread pool, its peak
memory is its own, and a crash ends only that run.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from io import FileIO

from hotlap.errors import RaceError
from hotlap.files import writing
from hotlap.progress import Say
from hotlap.race.engine import Ended, Engine, Task, Training
from hotlap.race.process import share_done, train_command
from hotlap.runs.reader import RunFiles

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class _Process:
    task: Task
    process: subprocess.Popen[bytes]
    started: float


class LocalEngine(Engine):
    def __init__(self, lock: FileIO | None, say: Say, at_once: int = 1) -> None:
        """The processes inherit `lock`: a run that outlives this process keeps it, and the next one waits."""
        assert at_once >= 1, f"room for at least one run, not {at_once}"
        self._slots = at_once
        self._inherited = [] if lock is None else [lock.fileno()]
        self._say = say
        self._processes: list[_Process] = []

    @property
    def slots(self) -> int:
        return self._slots

    def start(self, task: Task) -> None:
        words = train_command(task.path, task.words, task.procs, task.title, self._say)
        with writing(task.log, RaceError):
            log = task.log.open("ab")
        with log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=self._inherited,
            )
        self._processes.append(_Process(task, process, time.monotonic()))

    def training(self) -> list[Training]:
        return [
            Training(
                one.task, share_done(RunFiles(one.task.path).metrics_path, one.task.config.schedule.steps)
            )
            for one in self._processes
        ]

    def wait(self, seconds: float) -> list[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            ended = [one for one in self._processes if one.process.poll() is not None]
            if ended or time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        self._processes = [one for one in self._processes if one not in ended]
        return [Ended(one.task, one.process.wait(), time.monotonic() - one.started) for one in ended]

    def stop(self) -> None:
        for one in self._processes:
            one.process.terminate()  # the run saves a checkpoint and ends
        for one in self._processes:
            one.process.wait()
        self._processes.clear()
