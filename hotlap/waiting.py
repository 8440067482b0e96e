"""How OpenMP's threads wait for each other: spinning on a machine of their own, asleep beside other work.

A training step has hundreds of parallel regions. Threads that spin at the end of each save the time to wake
up; beside other work they take a core from the very thread they wait for (`python -m bench contention`).

GNU's OpenMP, which torch uses on Linux, spins at a wait unless the process has more OpenMP threads than there
are cores (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). So while other processes need the
cores, `sharing_cores` keeps a second team of threads asleep in this process, and ends it when they are done.
Other implementations go by `OMP_WAIT_POLICY` alone.

Only programs call this, never an import of the package: a process's threads and variables belong to whoever
started it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# OpenMP's own, and those of GNU's and LLVM's implementations. Whoever has set one of them has chosen.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

LOOK_SECONDS = 0.5
# How much of a core others may take before they count: a desktop is never quite idle.
SPARE_CORES = 0.2


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Let the OpenMP threads of this process make room for other processes, unless the user has chosen."""
    if any(name in os.environ for name in WAIT_VARIABLES):
        yield
        return
    if not sys.platform.startswith("linux"):
        # Read once, when torch is loaded. After that a run would record a policy that it does not have.
        if "torch" not in sys.modules:
            os.environ["OMP_WAIT_POLICY"] = "passive"
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(done,), name="hotlap-sharing-cores", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(done: threading.Event) -> None:
    team: SleepingTeam | None = None
    others = OtherProcesses()
    while not done.wait(LOOK_SECONDS):
        used = others.cores_used()
        crowded = "torch" in sys.modules and is_crowded(used, own_threads(), len(os.sched_getaffinity(0)))
        if crowded and team is None:
            team = SleepingTeam()
        elif not crowded and team is not None:
            team.end()
            team = None
    if team is not None:
        team.end()


def is_crowded(cores_of_others: float, own_threads: int, cores: int) -> bool:
    """Whether other processes need cores that the threads of this one would spin on."""
    return own_threads > 1 and cores_of_others + own_threads > cores + SPARE_CORES


def own_threads() -> int:
    import torch

    return torch.get_num_threads()


class SleepingTeam:
    """A team of OpenMP threads that does nothing but exist."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._master = threading.Thread(target=self._sleep, name="hotlap-sleeping-team", daemon=True)
        self._master.start()

    def _sleep(self) -> None:
        import torch

        torch.zeros(2**20).exp_()  # large enough for a parallel region, whose team stays with this thread
        self._ended.wait()

    def end(self) -> None:
        self._ended.set()
        self._master.join()


class OtherProcesses:
    """How much of this process's cores other processes use, from one look to the next."""

    def __init__(self) -> None:
        self._last = self._look()

    def cores_used(self) -> float:
        """The average since the last call."""
        (then, busy_then, own_then), self._last = self._last, self._look()
        now, busy, own = self._last
        return max(0.0, (busy - busy_then) - (own - own_then)) / (now - then)

    def _look(self) -> tuple[float, float, float]:
        """Seconds: the clock, busy time of the cores, and time of this process on them."""
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *counters = line.split()
            if name in cores:
                user, nice, system, _idle, _iowait, irq, softirq = map(int, counters[:7])
                ticks += user + nice + system + irq + softirq
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
