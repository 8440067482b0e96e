"""Rank, world size and device of this process, from torchrun's environment if it is set.

The rest of the package takes a `Distributed` and does not read the environment. The process group
exists while the context manager `process_group` is active, and is destroyed on any exit from it.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hotlap.distributed.heartbeat import Heartbeat
from hotlap.distributed.leaving import leave_with
from hotlap.errors import ConfigError, ConnectionLostError, DeviceError

T = TypeVar("T")

_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# Destroyed groups, kept alive until the process exits. Freeing a gloo group joins its threads while
# holding the GIL, and one of them may need it to release the last collective's tensor: a deadlock.
_destroyed_groups: list[dist.ProcessGroup | None] = []


@dataclass(frozen=True)
class Distributed:
    """`rank` is global, `local_rank` is per node. `has_group` is False without torchrun."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    has_group: bool

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_environment(device_type: str, environment: Mapping[str, str]) -> Distributed:
    """Read torchrun's variables.

    World size 1 if none is set; an error if some are missing or invalid.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        check_slurm_tasks(environment)
        return Distributed(0, 0, 1, 1, _device(device_type, 0), has_group=False)
    missing = [name for name in _TORCHRUN_VARIABLES if name not in environment]
    if missing:
        raise _malformed(f"{missing[0]} unset")
    # Optional, for environments that are set by hand.
    given = {"LOCAL_WORLD_SIZE": "1", **environment}
    numbers = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not given[name].isdecimal():
            raise _malformed(f"{name}={given[name]!r}")
        numbers[name] = int(given[name])
    rank, local_rank, world_size = numbers["RANK"], numbers["LOCAL_RANK"], numbers["WORLD_SIZE"]
    if not local_rank <= rank < world_size:
        raise _malformed(f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={world_size}")
    local_world_size = numbers["LOCAL_WORLD_SIZE"]
    if not 1 <= local_world_size <= world_size:
        raise _malformed(f"LOCAL_WORLD_SIZE={local_world_size}, WORLD_SIZE={world_size}")
    device = _device(device_type, local_rank)
    return Distributed(rank, local_rank, world_size, local_world_size, device, has_group=True)


@contextmanager
def process_group(device_type: str, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Distributed]:
    """Initialize the process group, wait for all ranks, and destroy the group on exit."""
    distributed = read_environment(device_type, os.environ)
    if distributed.device.type == "cuda":
        torch.cuda.set_device(distributed.device)
    if not distributed.has_group:
        yield distributed
        return
    on_cuda = distributed.device.type == "cuda"
    with explain_lost_connections(distributed, timeout):
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            rank=distributed.rank,
            world_size=distributed.world_size,
            timeout=timeout,
            # With a device, NCCL connects now instead of in the first timed step.
            device_id=distributed.device if on_cuda else None,
        )
        try:
            with name_silent_ranks(distributed, timeout):
                yield distributed
        finally:
            _destroyed_groups.append(dist.group.WORLD)
            dist.destroy_process_group()


@contextmanager
def name_silent_ranks(distributed: Distributed, timeout: timedelta) -> Iterator[None]:
    """Wait for all ranks, then end the process with a line that names a rank as soon as one hangs.

    The line is also the reason that is given if a collective fails while a rank is silent.
    """
    if distributed.world_size == 1:
        yield
        return
    # A connection of its own: the group's waits in the store while ranks connect to each other.
    stores: Any = dist  # which does not export them to type checkers
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = stores.TCPStore(address, port, timeout=timeout, wait_for_workers=False)
    # The store may outlive a group, and be that of the next one.
    signs = stores.PrefixStore(f"hotlap/{broadcast_from_main(uuid.uuid4().hex)}", store)
    with Heartbeat(signs, distributed.rank, distributed.world_size, timeout, leave_with) as heartbeat:
        dist.barrier()
        try:
            yield
        except RuntimeError as error:
            culprit = heartbeat.find_culprit() if is_lost_connection(error) else None
            if culprit is None:
                raise
            raise culprit from error


@contextmanager
def explain_lost_connections(distributed: Distributed, timeout: timedelta) -> Iterator[None]:
    """Raise `ConnectionLostError` for what torch raises when a rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        # Torch puts the place in its own sources before the reason, and a C++ stack after it.
        reason = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip().partition("\n")[0])
        minutes = timeout.total_seconds() / 60
        raise ConnectionLostError(
            expected=f"rank {distributed.rank} of {distributed.world_size} to reach all others within"
            f" {minutes:g} minutes",
            found=f"the connection lost ({reason})",
            do="see what the other ranks printed and check the network; then continue from the last"
            " checkpoint with `--resume`",
        ) from error


def is_lost_connection(error: RuntimeError) -> bool:
    """Gloo raises plain RuntimeErrors, which are known by the place that they name."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def broadcast_from_main(value: T) -> T:
    """The main rank's value, on every rank: for decisions that ranks might make differently."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _device(device_type: str, local_rank: int) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise DeviceError(
            expected="a CUDA device for each process of this node",
            found=f"{count} devices, local rank {local_rank}",
            do=f"start torchrun with --nproc-per-node of at most {count}",
        )
    return torch.device("cuda", local_rank)


def check_slurm_tasks(environment: Mapping[str, str]) -> None:
    """Refuse `srun` with several tasks and without torchrun: each task would train a run of its own."""
    tasks = environment.get("SLURM_NTASKS", "1")
    # A step of srun has a number; in the batch script itself it is not set, and that runs once.
    if "SLURM_STEP_ID" in environment and tasks != "1":
        raise ConfigError(
            expected="one task per node, which starts its ranks with torchrun",
            found=f"{tasks} tasks of srun that do not know each other",
            do="use `srun --ntasks-per-node 1 torchrun …` as in docs/gpus.md, or `srun --ntasks 1`",
        )


def _malformed(found: str) -> ConfigError:
    return ConfigError(
        expected="the environment that torchrun sets",
        found=found,
        do=f"start with torchrun, or unset {', '.join(_TORCHRUN_VARIABLES)} to train in one process",
    )
