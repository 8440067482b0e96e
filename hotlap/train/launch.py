"""`hotlap train --procs N`: the same command under torchrun's own launcher, on this machine.

Each worker writes the mistake that ended it to a file, so that the launcher can say in one line which rank
failed and why, instead of a report about processes.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hotlap.errors import TrainingError

FAILURE_FILE_VARIABLE = "HOTLAP_FAILURE_FILE"


def launch(procs: int, arguments: Sequence[str]) -> None:
    """Run `hotlap` with these arguments in `procs` processes; returns when all are done."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="hotlap-launch-") as folder:
        failure_file = Path(folder) / "failure"
        os.environ[FAILURE_FILE_VARIABLE] = str(failure_file)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=procs,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "hotlap", *arguments)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            told = failure_file.read_text() if failure_file.exists() else f"exit code {failure.exitcode}"
            raise TrainingError(
                expected=f"all {procs} processes to finish",
                found=told if failure_file.exists() else f"rank {rank} ended with {told}",
                do="see its output above; `--resume` goes on from the last checkpoint",
            ) from None


def tell_launcher(rank: int, message: str) -> bool:
    """Leave a worker's reason for failing where the launcher finds it; the first one counts."""
    path = os.environ.get(FAILURE_FILE_VARIABLE)
    if path is None:
        return False
    try:
        with open(path, "x") as file:
            file.write(f"rank {rank}: {message}")
    except FileExistsError:
        pass
    return True
