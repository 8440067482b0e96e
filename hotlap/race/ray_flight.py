"""A run on a Ray cluster, as seen from the race: asked how far it is, sent what it resumes from, fetched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray

from hotlap.errors import RaceError
from hotlap.files import write_atomically, writing
from hotlap.race.engine import Task
from hotlap.race.node import Look
from hotlap.race.transfer import CHUNK_BYTES, Piece, inventory, read_chunk, receive
from hotlap.runs.directory import RunDirectory
from hotlap.runs.reader import RunFiles

NAMESPACE = "hotlap"
NO_MACHINE = "no machine yet"
SECONDS_TO_END = 60.0


class Flight:
    def __init__(self, task: Task, name: str, actor: Any, *, is_placed: bool = False) -> None:
        self.task = task
        self.is_placed = is_placed  # on a machine, as far as is known
        self.look: Look | None = None  # the last
        self._name = name  # of the actor
        self._actor = actor
        self._asked: Any = None  # for the next look
        self._offset = 0  # in the metrics, of what is here

    @property
    def machine(self) -> str:
        return self.look.machine if self.look else NO_MACHINE

    @property
    def may_have_trained(self) -> bool:
        return self.is_placed and (self.look is None or self.look.is_begun)

    def ask(self) -> Any:
        """For a look, which `hear` takes when it comes; once until then."""
        if self._asked is None:
            self._asked = self._actor.look.remote(self._offset)
        return self._asked

    def forget(self) -> None:
        """The answer has come, or never will."""
        self._asked = None

    def hear(self, look: Look, live: Path) -> None:
        """Take a look and add its metrics to those in `live`. A run that waits for its files gets them."""
        self.look, self.is_placed = look, True
        if not look.is_begun:
            self._send()
        if look.metrics:
            files = RunFiles(live)
            live.mkdir(parents=True, exist_ok=True)
            for name, content in look.files.items():
                write_atomically(live / name, content)
            with files.metrics_path.open("r+b" if files.metrics_path.exists() else "wb") as file:
                file.truncate(look.offset)
                file.seek(look.offset)
                file.write(look.metrics)
            self._offset = look.offset + len(look.metrics)

    def _send(self) -> None:
        """Send the directory that the run is resumed from, and let it begin."""
        run = RunDirectory(self.task.path)
        with run:
            run.lock()  # refused if a process of this machine trains in it
            pieces = inventory(run.path)
            for piece in pieces:
                for offset in range(0, max(1, piece.bytes), CHUNK_BYTES):
                    chunk = read_chunk(run.path, piece.name, offset)
                    ray.get(self._actor.receive.remote(piece.name, offset, chunk))
        ray.get(self._actor.begin.remote(pieces))

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end."""
        self._actor.stop.remote()

    def fetch(self) -> None:
        """Bring the log and the directory of a run that has ended."""
        offset = 0
        while chunk := ray.get(self._actor.read_log.remote(offset)):
            with writing(self.task.log, RaceError), self.task.log.open("ab") as log:
                offset += log.write(chunk)
        pieces: list[Piece] = ray.get(self._actor.inventory.remote())
        if pieces:
            receive(self.task.path, pieces, self._read)

    def _read(self, name: str, offset: int) -> bytes:
        chunk: bytes = ray.get(self._actor.read.remote(name, offset))
        return chunk

    def remove(self) -> None:
        remove_actor(self._actor, self._name, is_placed=self.is_placed)


def remove_actor(actor: Any, name: str, *, is_placed: bool) -> None:
    """End an actor with what it keeps on its machine, and wait until its name is free."""
    if is_placed:
        ray.wait([actor.remove.remote()], timeout=SECONDS_TO_END)
    ray.kill(actor)
    deadline = time.monotonic() + SECONDS_TO_END
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name, NAMESPACE)
        except ValueError:
            return
        time.sleep(0.05)
