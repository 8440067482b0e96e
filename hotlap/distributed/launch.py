"""`hotlap train --procs N`: the same command under torchrun's own launcher, on this machine.

A worker leaves the mistake that ended it in a file instead of printing it, so that the launcher can say in
one line which rank failed and why, instead of a report about processes. Ctrl-C, SIGTERM and SIGHUP reach the
launcher only, and torch's hands them on: the workers save as one process does. No worker outlives it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from hotlap.distributed.signals import stop_signals
from hotlap.errors import INTERRUPTED, HotlapError, TrainingError

FAILURE_FILE_VARIABLE = "HOTLAP_FAILURE_FILE"
# What torch's launcher gives workers to end after a signal before it kills them: its own 30 s are few for
# a long step and a save. Older releases of torch leave it at that.
SECONDS_TO_SAVE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SECONDS_TO_SAVE = 120
SECONDS_TO_DIE = 10  # what the system may need for a killed process


def launch(procs: int, arguments: Sequence[str]) -> int:
    """Run `hotlap` with these arguments in `procs` processes; returns the exit code when all are done."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Torch's reports about processes. Not by the logger's name: the modules below it set levels of their own.
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="hotlap-launch-") as folder:
        failure_file = Path(folder) / "failure.json"
        os.environ[FAILURE_FILE_VARIABLE] = str(failure_file)
        os.environ.setdefault(SECONDS_TO_SAVE_VARIABLE, str(SECONDS_TO_SAVE))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=procs,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            # Or else the name of this machine, which not every resolver knows.
            local_addr="127.0.0.1",
            **torch_handles_only("SIGQUIT"),
        )
        try:
            with ended_workers():
                elastic_launch(config, sys.executable)("-m", "hotlap", *arguments)
        except SignalException:
            mistake = told_by_a_rank(failure_file)
            if mistake is not None:
                raise mistake from None
            return INTERRUPTED
        except ChildFailedError as failed:
            rank, exit_code = first_failure(
                [(rank, one.exitcode, one.timestamp) for rank, one in failed.failures.items()]
            )
            if exit_code == INTERRUPTED:
                return INTERRUPTED
            raise told_by_a_rank(failure_file) or died(procs, rank, exit_code) from None
    return 0


def torch_handles_only(signals: str) -> dict[str, Any]:
    """Keep torch's handlers from replacing ours: at a second signal they would wait for the workers once
    more, and leave them behind at a third. Older releases of torch cannot be kept from it.
    """
    from torch.distributed.launcher.api import LaunchConfig

    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return {"signals_to_handle": signals} if "signals_to_handle" in known else {}


@contextmanager
def ended_workers() -> Iterator[None]:
    """No worker outlives this `with`. The first signal is raised for torch, which hands it on and waits; a
    second Ctrl-C kills the workers.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    received = False

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        if received and (number != signal.SIGINT or kill_workers()):
            return
        received = True
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

    before = {number: signal.signal(number, on_signal) for number in stop_signals()}
    try:
        yield
    finally:
        kill_workers()  # before a further Ctrl-C could get in its way
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_workers() -> bool:
    """Whatever this process has started and is still alive; says whether there was any."""
    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, timeout=SECONDS_TO_DIE)
    return bool(workers)


def tell_launcher(mistake: HotlapError) -> bool:
    """Leave a worker's reason for failing where the launcher finds it; False where there is none.

    The first one counts: the other ranks fail because of it. It gets its name when it is whole, because a
    rank may be killed while it writes.
    """
    path, rank = os.environ.get(FAILURE_FILE_VARIABLE), os.environ.get("RANK")
    if path is None or rank is None:
        return False
    reason = {"rank": rank, "expected": mistake.expected, "found": mistake.found, "do": mistake.do}
    whole = Path(f"{path}.{rank}")
    try:
        whole.write_text(json.dumps(reason))
        os.link(whole, path)
    except FileExistsError:
        pass
    except OSError:
        return False
    return True


def told_by_a_rank(failure_file: Path) -> TrainingError | None:
    """What a rank has left there; None where none did, or not in a way that can be read."""
    try:
        reason = json.loads(failure_file.read_text())
        found = f"on rank {reason['rank']} {reason['found']}"
        return TrainingError(expected=reason["expected"], found=found, do=reason["do"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def first_failure(failures: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """(rank, exit code) of the failure that caused the others, out of (rank, exit code, second).

    The others notice a killed rank and leave within the same second, but torch's own SIGTERM only follows.
    """
    in_order = sorted(failures, key=lambda failure: failure[2])
    at_once = [(rank, exit_code) for rank, exit_code, second in in_order if second <= in_order[0][2] + 1]
    killed = [one for one in at_once if one[1] < 0 and one[1] != -signal.SIGTERM]
    return (killed or at_once)[0]


def died(procs: int, rank: int, exit_code: int) -> TrainingError:
    how = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
    return TrainingError(
        expected=f"all {procs} processes to finish",
        found=f"rank {rank} ended {how}",
        do="see its output above; `--resume` goes on from the last checkpoint",
    )
