"""Kills processes that save checkpoints, and checks after each that a complete one can be loaded.

Run as `python -m tests.killed_saves DIRECTORY steadily KILLS SEED` (SIGKILL after random delays) or
`… DIRECTORY everywhere` (the process ends before each thing it asks of the disk).
Importing torch takes long, so one process imports it and forks those that die.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotlap.runs import checkpoint as store
from hotlap.runs.checkpoint import Checkpoint

GROUPS = {"model": 0.0, "optimizer": 0.5}  # name → what its numbers are above the step


def checkpoint(step: int, history: int, numbers: int = 200_000) -> Checkpoint:
    """A checkpoint whose every number tells which one it is, large enough to be killed while writing."""
    groups = {group: {"weight": torch.full((numbers,), step + above)} for group, above in GROUPS.items()}
    return Checkpoint(step, groups, {"step": step, "history": history, "val_loss": 1.0 / (1 + step)})


def check_whole(directory: Path) -> Checkpoint:
    newest, passed_over = store.load_latest(directory)
    assert not passed_over
    assert newest.state["step"] == newest.step
    for group, above in GROUPS.items():
        assert (newest.tensors[group]["weight"] == newest.step + above).all()
    for path in store.stored(directory).values():
        store.load(path)
    return newest


def in_child(work: Callable[[], None]) -> int:
    """Fork, do the work there and end without any clean-up; returns the child's id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def kill_steadily(directory: Path, kills: int, seed: int) -> None:
    delays = random.Random(seed)
    store.save(directory, checkpoint(0, 0), keep=2)
    interrupted = 0
    for history in range(1, kills + 1):
        newest = check_whole(directory)

        def save_without_end(first: int = newest.step, history: int = history) -> None:
            for step in range(first, first + 10**6):  # the first one replaces the one resumed from
                store.save(directory, checkpoint(step, history), keep=2)

        child = in_child(save_without_end)
        time.sleep(delays.uniform(0.0, 0.08))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the saving process ended by itself"
        interrupted += any(path.name.startswith(".") for path in directory.iterdir())
        after = check_whole(directory)
        assert after.step >= newest.step, "a saved step was lost"
    store.save(directory, checkpoint(10**7, 0), keep=1, keep_best=False)
    assert [path.name for path in directory.iterdir()] == ["step-10000000"]
    print(f"kills={kills} interrupted={interrupted}")


DISK_CALLS = [(os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (store, "save_file")]


def end_before(call_number: int) -> None:
    """From now on, end the process instead of its `call_number`-th request to the disk."""
    count = 0

    def fatal(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call_number:
                os._exit(9)
            return original(*args, **kwargs)

        return wrapped

    for owner, name in DISK_CALLS:
        setattr(owner, name, fatal(getattr(owner, name)))


def kill_everywhere(directory: Path) -> None:
    """Two saves, one that replaces a step and one that prunes it, ended at every point of them."""
    os.fsync = lambda _: None  # a killed process, unlike a power cut, loses nothing that was written
    for call_number in itertools.count(1):
        shutil.rmtree(directory, ignore_errors=True)
        store.save(directory, checkpoint(3, 0, 10), keep=1)

        def replace_and_go_on(call_number: int = call_number) -> None:
            end_before(call_number)
            store.save(directory, checkpoint(3, 1, 10), keep=1)
            store.save(directory, checkpoint(4, 1, 10), keep=1)

        _, status = os.waitpid(in_child(replace_and_go_on), 0)
        check_whole(directory)
        if os.waitstatus_to_exitcode(status) == 0:
            print(f"points={call_number - 1}")
            return
        assert os.waitstatus_to_exitcode(status) == 9
        # The next save sweeps up whatever the killed one left behind.
        store.save(directory, checkpoint(3, 2, 10), keep=1)
        assert [path.name for path in directory.iterdir()] == ["step-000003"]
        assert check_whole(directory).state["history"] == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, mode, *rest = sys.argv[1:]
    if mode == "steadily":
        kill_steadily(Path(place), int(rest[0]), int(rest[1]))
    else:
        kill_everywhere(Path(place))
