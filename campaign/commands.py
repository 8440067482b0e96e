"""Runs `hotlap` commands as users do, but in forked children that find everything imported already.

A child has its own session, limits on memory and processor time, and files as its output. So hundreds of
commands a minute can be run, killed at any moment, and asked how they ended.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 2**20
CPU_SECONDS = 60  # of one command; a hang that computes ends by SIGXCPU
WAIT_SECONDS = 300  # a hang that waits; long, because the machine may be busy
EXTRA_MIB = 1024  # of address space, beyond what is mapped before the command starts


@dataclass(frozen=True)
class Limits:
    cpu_seconds: int = CPU_SECONDS
    wait_seconds: float = WAIT_SECONDS
    extra_mib: int | None = EXTRA_MIB  # None: no limit, for commands that start processes of their own
    file_bytes: int | None = None  # the largest file that may be written


@dataclass(frozen=True)
class Ended:
    """How a command ended. A negative code is the signal that ended it, as in `subprocess`."""

    code: int
    hung: bool
    out: str
    err: str
    seconds: float


def preload() -> None:
    """Import what commands need. Nothing is computed: a forked child cannot use its parent's threads."""
    import importlib

    import plotly.graph_objects
    import pyarrow.parquet
    import safetensors.torch
    import scipy.stats
    import tiktoken
    import tokenizers
    import torch
    import zstandard

    from hotlap.cli import COMMANDS

    assert all((plotly, pyarrow, safetensors, scipy, tiktoken, tokenizers, torch, zstandard)), "imported"
    for name in COMMANDS:
        importlib.import_module(f"hotlap.commands.{name}")
    for name in (
        "train.run",
        "corpus.prepare",
        "race.runner",
        "race.results",
        "report.page",
        "inference.export",
    ):
        importlib.import_module(f"hotlap.{name}")


class Running:
    """A command that has been started in `place`, its current directory."""

    def __init__(
        self,
        words: Sequence[str],
        place: Path,
        scratch: Path,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        before: Callable[[], object] | None = None,
    ) -> None:
        self.limits = limits
        self.began = time.monotonic()
        self._out, self._err = scratch / "out", scratch / "err"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_command(words, place, before)
        self._handle = os.pidfd_open(self.pid)

    def _be_the_command(self, words: Sequence[str], place: Path, before: Callable[[], object] | None) -> None:
        code = 1
        try:
            os.setsid()
            for number, path in ((0, Path(os.devnull)), (1, self._out), (2, self._err)):
                flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(path, flags), number)
            os.chdir(place)
            set_limits(self.limits)
            if before is not None:
                before()
            code = call_main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []

    def signal_all(self, number: int) -> None:
        send(self.descendants(), number)

    def has_ended(self, within_s: float) -> bool:
        return bool(select.select([self._handle], [], [], within_s)[0])

    def wait(self) -> Ended:
        """Wait for the end of the command. One that hangs is killed, with its processes."""
        left = self.began + self.limits.wait_seconds - time.monotonic()
        hung = not self.has_ended(max(0.0, left))
        if hung:
            self.signal_all(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._handle)
        code = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - self.began
        out, err = (path.read_text(errors="replace") for path in (self._out, self._err))
        return Ended(code, hung or code == -signal.SIGXCPU, out, err, seconds)


def run(words: Sequence[str], place: Path, scratch: Path, limits: Limits = Limits()) -> Ended:  # noqa: B008
    return Running(words, place, scratch, limits).wait()


def send(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def set_limits(limits: Limits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 5))
    if limits.extra_mib is not None:
        mapped = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (mapped + limits.extra_mib * MIB,) * 2)
    if limits.file_bytes is not None:
        # Writing beyond it raises OSError: Python ignores SIGXFSZ.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes,) * 2)


def call_main(words: Sequence[str]) -> int:
    from hotlap import cli
    from hotlap.train import flops

    flops.measure_matmul_gflops = lambda *_, **__: 100.0  # takes longer than training does here
    try:
        cli.main(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
