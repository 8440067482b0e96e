"""What carries out runs: the interface of an engine, and the loop that keeps one busy.

A task is one run, which an engine trains in a process of its own. `local` trains here, one run after the
other by default; `ray` on the machines of a cluster. A race, an ablation, a sweep and whatever else is made
of runs describes them as tasks, and does not ask where they are trained.

    with open_engine("local", path, lock, say) as engine:
        for ended in carry_out(engine, tasks):
            ...

What an engine promises: the directory of a run that has ended is at `task.path`, whole, and its output at the
end of `task.log`. A run that was killed goes on from its last checkpoint, or starts again without one. A run
is never trained twice at the same time. Leaving the `with` block by an exception stops the runs that are
training; each saves a checkpoint first.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.progress import Say

LOCAL, RAY = "local", "ray"
MARK_NAME = ".ray.json"  # in the directory of a race while runs of it may be on a cluster
LIVE_NAME = ".live"  # beside it: the metrics so far of runs that train on other machines
SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Task:
    title: str  # what messages call it
    path: Path  # of the run's directory
    log: Path  # the output of the run's process is appended to it
    words: tuple[
        str, ...
    ]  # of `hotlap train`: the recipe and its options, without those that follow from this
    config: Config = field(compare=False)  # what the words mean
    procs: int | None = None  # processes of the run; None: no launcher


class Training(NamedTuple):
    """A task that is being carried out."""

    task: Task
    share: float  # of its steps that are done
    machine: str | None = None  # where, if that is not this machine


class Ended(NamedTuple):
    task: Task
    exit_code: int
    seconds: float  # from the start of its process to its end


class Engine(ABC):
    @property
    @abstractmethod
    def slots(self) -> int:
        """How many runs it can train at once, 1 or more; on a cluster that changes."""

    def find(self, tasks: Sequence[Task]) -> list[Task]:
        """Take over those tasks that are being carried out already, for a process that was killed."""
        del tasks  # an engine whose runs do not outlive it has none
        return []

    @abstractmethod
    def start(self, task: Task) -> None:
        """Begin a task and return."""

    @abstractmethod
    def training(self) -> list[Training]:
        """The tasks that were started or found, and have not been returned by `wait`."""

    @abstractmethod
    def wait(self, seconds: float) -> list[Ended]:
        """The tasks that have ended; waits for one, but not longer than this."""

    @abstractmethod
    def stop(self) -> None:
        """End all runs. Each saves a checkpoint, and its directory is left as after a Ctrl-C."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()


def carry_out(
    engine: Engine, tasks: Iterable[Task], look: Callable[[], None] = lambda: None
) -> Iterator[Ended]:
    """Start each task when the engine has room for it, and yield each that has ended.

    The next task is asked for only when there is room, so that an iterator may decide late whether to go on.
    Whoever needs the results of some runs to choose the next ones calls this once for each group. `look` is
    called about twice a second.
    """
    waiting = iter(tasks)
    is_last = False
    while True:
        while not is_last and len(training := engine.training()) < engine.slots:
            task = next(waiting, None)
            is_last = task is None
            if task is not None and all(task.path != other.task.path for other in training):
                engine.start(task)
        if not engine.training():
            return
        look()
        yield from engine.wait(SECONDS_BETWEEN_LOOKS)


def check_engine(on: str, directory: Path, configs: Sequence[Config], procs: int | None = None) -> None:
    """Refuse an engine that cannot train these runs in `directory`, before anything is written."""
    name, address = _parsed(on)
    if name == LOCAL:
        if (directory / MARK_NAME).exists():
            raise ConfigError(
                expected=f"--on {RAY} for {directory}, of which runs may be on a cluster",
                found=f"--on {LOCAL}",
                do=f"add --on {RAY}[=ADDRESS], or remove {directory / MARK_NAME} if that cluster is gone",
            )
        return
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            expected=f"the package ray for --on {RAY}",
            found="it is not installed",
            do="pip install ray",
        )
    from hotlap.race.ray_machines import check_cluster

    check_cluster(address, configs, procs)


def _parsed(on: str) -> tuple[str, str | None]:
    """(engine, address) of `--on`."""
    name, equals, address = on.partition("=")
    if name not in (LOCAL, RAY) or (equals and (name == LOCAL or not address)):
        raise ConfigError(
            expected=f"--on {LOCAL}, {RAY} or {RAY}=ADDRESS", found=f"`{on}`", do="choose one of them"
        )
    return name, address or None


def open_engine(on: str, directory: Path, lock: FileIO | None, say: Say, *, at_once: int = 1) -> Engine:
    """The engine that `--on` names, for tasks whose directories are in `directory`.

    lock: the processes of local runs inherit this file. at_once: how many runs `local` trains at once; a
    cluster takes as many as fit.
    """
    name, address = _parsed(on)
    if name == RAY:
        from hotlap.race.ray_cluster import RayEngine

        return RayEngine(address, directory, say)
    from hotlap.race.local import LocalEngine

    return LocalEngine(lock, say, at_once)
