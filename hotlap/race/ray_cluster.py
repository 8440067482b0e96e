"""Trains runs on the machines of a Ray cluster (https://www.ray.io), as many at once as fit.

Each run is an actor with a name and a life of its own. The name exists once in the cluster, so no run is
trained twice; and it outlives this process, so a race that was killed finds its runs again when it is called
again. A run whose machine was lost starts again on another one. The directory of a run that has ended is
fetched, verified and put in its place by one rename, and only then is its actor removed.

Ray's own retries are off: an actor that Ray restarts would begin without anybody who counts its attempts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from hotlap.config import Config
from hotlap.corpus.configured import ensure_data
from hotlap.errors import PREEMPTED, HotlapError, RaceError
from hotlap.json_files import read_sealed, write_sealed
from hotlap.progress import Say
from hotlap.race.engine import LIVE_NAME, MARK_NAME, Ended, Engine, Task, Training
from hotlap.race.node import Look, Order
from hotlap.race.node_process import code_version, data_fingerprints
from hotlap.race.process import has_checkpoint
from hotlap.race.ray_flight import NAMESPACE, Flight, remove_actor
from hotlap.race.ray_machines import Needs, NodeOnRay, connect, machines, needs_of
from hotlap.runs.directory import RunDirectory
from hotlap.settings import to_json

MOST_ATTEMPTS = 4  # of a run whose machines are lost
TOLD_TO_STOP = (PREEMPTED, -signal.SIGTERM)  # exit codes of a run: saved, or not yet begun
SECONDS_TO_ANSWER = 10.0
SECONDS_TO_STOP = 180.0
SECONDS_BETWEEN_COUNTS = 2.0

# Of the environment of whoever starts the race: what changes results or speed on any machine.
VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "GOMP_SPINCOUNT", "HOTLAP_NATIVE", "KMP_BLOCKTIME", "MKL_NUM_THREADS"),
    *("NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "ONEDNN_MAX_CPU_ISA"),
)


class RayEngine(Engine):
    def __init__(self, address: str | None, directory: Path, say: Say) -> None:
        self._directory = directory
        self._say = say
        self._flights: list[Flight] = []
        self._attempts: dict[Path, int] = {}
        self._is_stopping = False
        self._leaves_runs = False  # on the cluster, when it has stopped
        self._fingerprints: dict[Any, tuple[str, str]] = {}
        self._counted: tuple[float, int] = (-SECONDS_BETWEEN_COUNTS, 1)
        self._needs: Needs | None = None  # of the first task; a race's are alike
        self._version = code_version()
        connect(address)
        mark = directory / MARK_NAME
        known = read_sealed(mark, RaceError).get("race") if mark.exists() else None
        self._race = known if isinstance(known, str) else secrets.token_hex(8)

    @property
    def slots(self) -> int:
        """What fits the machines, and one more: a run that waits tells an autoscaler to add machines."""
        began, count = self._counted
        if time.monotonic() - began > SECONDS_BETWEEN_COUNTS:
            count = sum(self._needs.fit(resources) for resources in machines()) if self._needs else 1
            self._counted = (time.monotonic(), count)
        return count + 1

    def find(self, tasks: Sequence[Task]) -> list[Task]:
        tasks_by_name = {self._name(task): task for task in tasks}
        if tasks:
            self._needs = needs_of(tasks[0].config, tasks[0].procs)
        for entry in ray.util.list_named_actors(all_namespaces=True):
            name = str(entry["name"])
            if entry["namespace"] == NAMESPACE and name.startswith(f"{self._race}/"):
                self._take_over(name, ray.get_actor(name, NAMESPACE), tasks_by_name.get(name))
        self._unmark()
        return [flight.task for flight in self._flights]

    def _take_over(self, name: str, actor: Any, task: Task | None) -> None:
        """Go on with a run that an earlier process has started, or end it."""
        asked = actor.order.remote()
        # A run that waits for a machine does not answer, and has trained nothing.
        ready, _ = ray.wait([asked], timeout=SECONDS_TO_ANSWER)
        try:
            order: Order | None = ray.get(asked) if ready else None
        except RayError:
            order = None
        # Without a task it has been fetched already.
        if task is not None and order is not None and order.identity == self._order(task).identity:
            self._flights.append(Flight(task, name, actor, is_placed=True))
            self._say(f"race: {task.title}: found again on the cluster")
        else:
            remove_actor(actor, name, is_placed=bool(ready))

    def start(self, task: Task) -> None:
        mark = self._directory / MARK_NAME
        if not mark.exists():
            write_sealed(mark, {"race": self._race}, RaceError)
        order = self._order(task)
        needs = needs_of(task.config, task.procs)
        if self._needs is None:
            self._needs = needs
        if order.is_resumed:
            self._say(f"race: {task.title}: resumes from its last checkpoint")
        if not any(needs.fit(resources) for resources in machines()):
            self._say(f"race: {task.title}: waits for a machine with {needs.cpus} CPUs, {needs.gpus} GPUs")
        name = self._name(task)
        actor = (
            ray.remote(NodeOnRay)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=needs.cpus,
                num_gpus=needs.gpus,
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(order)
        )
        self._flights.append(Flight(task, name, actor))

    def training(self) -> list[Training]:
        return [
            Training(flight.task, flight.look.share if flight.look else 0.0, flight.machine)
            for flight in self._flights
        ]

    def wait(self, seconds: float) -> list[Ended]:
        deadline = time.monotonic() + seconds
        ended: list[Ended] = []
        asked = {flight.ask(): flight for flight in self._flights}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        for answer in ready:
            flight = asked[answer]
            flight.forget()
            try:
                look: Look = ray.get(answer)
                flight.hear(look, self._live(flight))
                if look.exit_code is not None:
                    flight.fetch()
                    self._end(flight)
                    if look.exit_code in TOLD_TO_STOP and not self._is_stopping:
                        self._start_again(flight, f"was told to stop on {flight.machine}")
                    else:
                        ended.append(Ended(flight.task, look.exit_code, look.seconds))
            except ActorUnavailableError:
                continue  # asked again
            except (RayError, HotlapError) as error:
                self._failed(flight, error)
        if not ended and deadline > time.monotonic():
            time.sleep(deadline - time.monotonic())
        self._unmark()
        return ended

    def stop(self) -> None:
        """As an engine promises. What cannot be fetched now stays on its machine until it is asked for."""
        self._is_stopping = True
        for flight in [flight for flight in self._flights if not flight.may_have_trained]:
            self._end(flight)
        for flight in self._flights:
            flight.stop()
        deadline = time.monotonic() + SECONDS_TO_STOP
        while self._flights and time.monotonic() < deadline:
            self.wait(0.2)
        for flight in list(self._flights):
            self._leave(flight, f"{flight.machine} does not answer")
        self._unmark()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(kind, *rest)
        ray.shutdown()

    def _name(self, task: Task) -> str:
        return f"{self._race}/{task.path.name}"

    def _order(self, task: Task) -> Order:
        return Order(
            race=self._race,
            name=task.path.name,
            title=task.title,
            words=task.words,
            config=to_json(task.config),
            procs=task.procs,
            steps=task.config.schedule.steps,
            folder=os.getcwd(),
            variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
            fingerprints=self._data_of(task.config),
            version=self._version,
            is_resumed=task.path.exists() and has_checkpoint(RunDirectory(task.path)),
        )

    def _data_of(self, config: Config) -> tuple[str, str]:
        key = (config.data.source, config.data.tokenizer, config.data.num_shards, config.model.vocab_size)
        if key not in self._fingerprints:
            ensure_data(config, self._say)
            self._fingerprints[key] = data_fingerprints(config)
        return self._fingerprints[key]

    def _end(self, flight: Flight) -> None:
        self._flights.remove(flight)
        flight.remove()
        shutil.rmtree(self._live(flight), ignore_errors=True)

    def _live(self, flight: Flight) -> Path:
        return self._directory / LIVE_NAME / flight.task.path.name

    def _failed(self, flight: Flight, error: RayError | HotlapError) -> None:
        """A run could not be asked, sent or fetched. While stopping, the others are fetched all the same."""
        is_lost = isinstance(error, RayActorError)
        if is_lost and not self._is_stopping:
            self._end(flight)
            self._start_again(flight, f"lost with {flight.machine}", error)
        elif is_lost:
            self._end(flight)
            self._say(f"race: {flight.task.title}: lost with {flight.machine}, and not saved")
        elif self._is_stopping:
            self._leave(flight, last_line(error))
        elif isinstance(error, HotlapError):
            raise error
        else:
            raise RaceError(
                expected=f"{flight.task.title} to be read from machine {flight.machine}",
                found=last_line(error),
                do="see Ray's logs there; the same command goes on",
            ) from error

    def _start_again(self, flight: Flight, why: str, error: RayError | None = None) -> None:
        task = flight.task
        attempts = self._attempts[task.path] = self._attempts.get(task.path, 1) + 1
        if attempts > MOST_ATTEMPTS:
            found = f"that each was lost, the last with `{last_line(error)}`" if error else f"that it {why}"
            raise RaceError(
                expected=f"{task.title} to finish on one of {MOST_ATTEMPTS} attempts",
                found=found,
                do="see `ray status` and Ray's logs on the machines; the same command goes on",
            )
        self._say(f"race: {task.title}: {why}; it starts again")
        self.start(task)

    def _leave(self, flight: Flight, why: str) -> None:
        """Leave a run on the cluster, where the next call finds it."""
        self._flights.remove(flight)
        self._leaves_runs = True
        self._say(f"race: {flight.task.title}: not fetched: {why}; the same command tries again")

    def _unmark(self) -> None:
        """Note on the disk that no run is on the cluster."""
        if not self._flights and not self._leaves_runs:
            (self._directory / MARK_NAME).unlink(missing_ok=True)
            shutil.rmtree(self._directory / LIVE_NAME, ignore_errors=True)


def last_line(error: RayError | HotlapError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
