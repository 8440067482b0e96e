"""One run on a machine of a cluster, in a directory of that machine's cache until it is fetched.

`NodeRun` is the process that stands for the run: it starts the training, tells how far it is, and hands out
the directory in the end. It knows nothing of Ray, whose actor it becomes. If it dies, its training is told to
stop, and the lock of the directory is free only when that has ended: two processes never train one run on a
machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from hotlap.errors import RaceError
from hotlap.files import cache_directory, lock, make_directory, writing
from hotlap.json_files import finite, read_sealed, write_sealed
from hotlap.race.process import share_done
from hotlap.race.transfer import Piece, inventory, read_chunk, receive
from hotlap.runs.reader import RunFiles
from hotlap.runs.recorded import MACHINE_VARIABLE

SECONDS_KEPT = 24 * 3600  # for how long a run that has ended waits for whoever started it
SECONDS_BETWEEN_LOOKS = 60
SECONDS_TO_SAVE = 30
MOST_METRICS_BYTES = 1 << 20  # of one look


@dataclass(frozen=True)
class Order:
    """What to train; plain data."""

    race: str  # names the race, so that runs of others are not taken for its own
    name: str  # of the run's directory
    title: str
    words: tuple[str, ...]  # of `hotlap train`
    config: Mapping[str, Any]  # the same as JSON
    procs: int | None
    steps: int
    folder: str  # the working directory, if this machine has it
    variables: Mapping[str, str]  # of the environment
    fingerprints: tuple[str, str]  # of the training and the validation data
    version: str  # of the code; see `code_version`
    is_resumed: bool  # from a directory that is sent, and not from the beginning

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it the same run as another, wherever the command was given; as JSON has it."""
        content: dict[str, Any] = finite(asdict(self))
        return {name: value for name, value in content.items() if name not in ("folder", "variables")}


class Look(NamedTuple):
    """How far a run is."""

    machine: str
    is_begun: bool
    share: float  # of its steps that are done
    exit_code: int | None  # None while it trains
    seconds: float  # since its process was started
    offset: int  # in metrics.jsonl, of
    metrics: bytes  # what it has grown by, whole lines or not
    files: Mapping[str, bytes]  # its configuration and environment, with the first metrics


class NodeRun:
    def __init__(self, order: Order, machine: str) -> None:
        self._order = order
        self._machine = machine
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._touched = time.monotonic()
        self._seconds = 0.0
        root = cache_directory() / "races" / socket.gethostname()
        with writing(root, RaceError):
            make_directory(root)
            remove_leftovers(root)
            self._place = root / f"{order.race}-{order.name}"
            # If the process of a lost run still saves its last checkpoint, this waits for it.
            self._lock = lock(root / f"{self._place.name}.lock", lambda _owner: None)
            self._path = self._place / order.name
            if order.is_resumed or not self._is_same_order():
                shutil.rmtree(self._place, ignore_errors=True)
            make_directory(self._place)
        write_sealed(self._place / "order.json", {"identity": order.identity}, RaceError)
        threading.Thread(target=self._end_when_forgotten, daemon=True).start()
        if not order.is_resumed:
            self._start()

    def order(self) -> Order:
        return self._order

    def receive(self, name: str, offset: int, chunk: bytes) -> None:
        """A part of the directory to resume from."""
        path = self._place / "received" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(chunk)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Train, from the directory that has been received."""
        if self._process is None:
            received = self._place / "received"
            receive(self._path, pieces, lambda name, offset: read_chunk(received, name, offset))
            shutil.rmtree(received)
            self._start()

    def look(self, offset: int) -> Look:
        """How far the run is, and its metrics from this offset on."""
        self._touched = time.monotonic()
        files = RunFiles(self._path)
        exit_code = None if self._process is None else self._process.poll()
        if exit_code is None:
            self._seconds = time.monotonic() - self._started
        offset, metrics = _grown(files.metrics_path, offset)
        first = (files.config_path, files.environment_path) if metrics and offset == 0 else ()
        return Look(
            machine=self._machine,
            is_begun=self._process is not None,
            share=share_done(files.metrics_path, self._order.steps),
            exit_code=exit_code,
            seconds=self._seconds,
            offset=offset,
            metrics=metrics,
            files={path.name: path.read_bytes() for path in first if path.exists()},
        )

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end."""
        if self._process is not None:
            self._process.terminate()

    def inventory(self) -> list[Piece]:
        """The files of the run that has ended."""
        return inventory(self._path) if self._path.is_dir() else []

    def read(self, name: str, offset: int) -> bytes:
        self._touched = time.monotonic()
        return read_chunk(self._path, name, offset)

    def read_log(self, offset: int) -> bytes:
        return read_chunk(self._place, "log.txt", offset)

    def remove(self) -> None:
        """End the run if it trains, and remove what is here of it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(SECONDS_TO_SAVE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._place, ignore_errors=True)
        _remove_lock(self._lock)

    def _start(self) -> None:
        self._started = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with (self._place / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hotlap.race.node_process", str(os.getpid()), str(self._path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._order.folder if Path(self._order.folder).is_dir() else self._place,
                env={**environment, **self._order.variables, MACHINE_VARIABLE: self._machine},
                pass_fds=[self._lock.fileno()],
            )

    def _is_same_order(self) -> bool:
        """Whether the directory here is of the same run, which was lost and can go on."""
        path = self._place / "order.json"
        try:
            return path.exists() and read_sealed(path, RaceError)["identity"] == self._order.identity
        except (RaceError, KeyError):
            return False

    def _end_when_forgotten(self) -> None:
        """End this process, which holds CPUs or GPUs, if nobody has asked for the run for a day."""
        while True:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            trains = self._process is not None and self._process.poll() is None
            if trains:
                self._touched = time.monotonic()
            elif time.monotonic() - self._touched > SECONDS_KEPT:
                os._exit(0)


def _grown(path: Path, offset: int) -> tuple[int, bytes]:
    """(offset, content from there); from the beginning if the file is shorter, as after a resume."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            at = offset if offset <= size else 0
            file.seek(at)
            return at, file.read(MOST_METRICS_BYTES)
    except OSError:
        return offset, b""


def remove_leftovers(root: Path) -> None:
    """Remove the directories of runs that nobody holds: their process or their machine was lost."""
    for path in root.glob("*.lock"):
        try:
            if time.time() - path.stat().st_mtime < SECONDS_KEPT:
                continue
            held = lock(path, _refuse)
        except OSError:  # held, or just removed by another
            continue
        shutil.rmtree(root / path.name.removesuffix(".lock"), ignore_errors=True)
        _remove_lock(held)


def _refuse(_owner: str) -> None:
    raise BlockingIOError


def _remove_lock(file: FileIO) -> None:
    Path(os.fsdecode(file.name)).unlink(missing_ok=True)
    file.close()
