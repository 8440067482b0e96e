"""`hotlap train --procs N`: the same command in N local processes, with torchrun's launcher.

A worker that fails writes its error to a file instead of printing it. The launcher then prints one
line that says which rank failed and why. The launcher forwards Ctrl-C, SIGTERM and SIGHUP to the
workers, which save a checkpoint as a single process does. No worker outlives the launcher: if it is killed,
they are told to stop by the system, and save as well.
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
from hotlap.errors import (
    BUG,
    INTERRUPTED,
    PREEMPTED,
    USER_MISTAKE,
    ConnectionLostError,
    HotlapError,
    SilentRankError,
    TrainingError,
)

FAILURE_FILE_VARIABLE = "HOTLAP_FAILURE_FILE"
LAUNCHER_VARIABLE = "HOTLAP_LAUNCHER"  # its process
# How long torch's launcher waits for workers after a signal before it kills them. The default is
# short for a long step and a save. Older releases of torch ignore the variable.
SECONDS_TO_SAVE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
SECONDS_TO_SAVE = 120
SECONDS_TO_DIE = 10  # how long to wait for a killed process to exit


def launch(procs: int, arguments: Sequence[str]) -> int:
    """Run `hotlap` with `arguments` in `procs` processes.

    Returns the exit code once all have exited.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Silences torch's reports about its workers. Setting the level of a parent logger is not
    # enough, because torch's modules set their own levels.
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="hotlap-launch-") as folder:
        failure_file = Path(folder) / "failure.json"
        os.environ[FAILURE_FILE_VARIABLE] = str(failure_file)
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        os.environ.setdefault(SECONDS_TO_SAVE_VARIABLE, str(SECONDS_TO_SAVE))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=procs,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            # The default is the hostname, which does not resolve on every machine.
            local_addr="127.0.0.1",
            **torch_signals_option("SIGQUIT"),
        )
        try:
            with kill_workers_on_exit():
                elastic_launch(config, sys.executable)("-m", "hotlap", *arguments)
        except SignalException as received:
            error = read_failure(failure_file)
            if error is not None:
                raise error from None
            return INTERRUPTED if received.sigval == signal.SIGINT else PREEMPTED
        except ChildFailedError as failed:
            failures = [(rank, one.exitcode, one.timestamp) for rank, one in failed.failures.items()]
            rank, exit_code = first_failure(failures)
            if exit_code in (INTERRUPTED, PREEMPTED):
                return exit_code
            error = read_failure(failure_file)
            if error is None and exit_code == USER_MISTAKE:
                # No rank had an error of its own.
                error = read_failure(lost_connection_file(failure_file))
            raise error or rank_died(procs, rank, exit_code) from None
    return 0


def torch_signals_option(signals: str) -> dict[str, Any]:
    """The LaunchConfig option that makes torch handle only these `signals`.

    Torch's handlers would replace ours. They wait for the workers again at a second signal and
    leave them running at a third. Older releases of torch do not have the option.
    """
    from torch.distributed.launcher.api import LaunchConfig

    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return {"signals_to_handle": signals} if "signals_to_handle" in known else {}


@contextmanager
def kill_workers_on_exit() -> Iterator[None]:
    """Kill all workers that are still running when the `with` block ends.

    The first signal raises torch's SignalException: torch forwards the signal to the workers and
    waits for them. A second Ctrl-C kills the workers.
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
        kill_workers()  # while our handlers are active: another Ctrl-C must not interrupt it
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_workers() -> bool:
    """Kill all child processes. Returns whether there were any."""
    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, timeout=SECONDS_TO_DIE)
    return bool(workers)


def tell_launcher(error: HotlapError) -> bool:
    """Write a worker's error to the failure file. Returns False without a launcher to read it.

    The first error is kept, because the other ranks fail as a result of it. A lost connection is such a
    result, and is kept in a file of its own. A file is written under a temporary name and then linked,
    because a rank can be killed while it writes.
    """
    path, rank = os.environ.get(FAILURE_FILE_VARIABLE), os.environ.get("RANK")
    if path is None or rank is None:
        return False
    found = error.found if isinstance(error, SilentRankError) else f"on rank {rank} {error.found}"
    reason = {"expected": error.expected, "found": found, "do": error.do}
    temporary = Path(f"{path}.{rank}")
    is_result = isinstance(error, ConnectionLostError)
    try:
        temporary.write_text(json.dumps(reason))
        os.link(temporary, lost_connection_file(Path(path)) if is_result else path)
    except FileExistsError:
        pass
    except OSError:
        return False
    return True


def lost_connection_file(failure_file: Path) -> Path:
    return failure_file.with_name("lost-connection.json")


def read_failure(failure_file: Path) -> TrainingError | None:
    """The error that a rank wrote to the failure file; None if there is no readable one."""
    try:
        reason = json.loads(failure_file.read_text())
        return TrainingError(expected=reason["expected"], found=reason["found"], do=reason["do"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def first_failure(failures: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """(rank, exit code) of the failure that caused the others, from (rank, exit code, second).

    When a rank is killed or fails by a bug, the others lose their connection to it and exit within about a
    second. Torch's SIGTERM to the remaining ranks is a consequence, not a cause.
    """
    in_order = sorted(failures, key=lambda failure: failure[2])
    simultaneous = [(rank, exit_code) for rank, exit_code, second in in_order if second <= in_order[0][2] + 1]
    killed = [one for one in simultaneous if one[1] < 0 and one[1] != -signal.SIGTERM]
    bugs = [one for one in simultaneous if one[1] == BUG]
    return (killed or bugs or simultaneous)[0]


def rank_died(procs: int, rank: int, exit_code: int) -> TrainingError:
    how = f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"
    return TrainingError(
        expected=f"all {procs} processes to finish",
        found=f"rank {rank} ended {how}",
        do="see its output above; continue from the last checkpoint with `--resume`",
    )
