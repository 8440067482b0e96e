"""Runs a function on several gloo ranks of this machine and hands back what each returned.

A rank that raises ends the others and is reported with its number and traceback; one that hangs is reported
after a time limit. Ranks are single-threaded processes, forked from a server that has imported torch once.
"""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Without a name to resolve or an interface to choose, ranks on one machine find each other anywhere.
ADDRESS = "127.0.0.1"

# Imported once, not by every rank. An optimizer's first use imports torch._dynamo, which takes a second.
PRELOADED = ["torch.distributed", "torch._dynamo", "hypothesis", "pytest", "hotlap.optim"]


class RankError(Exception):
    """A rank raised, died or did not end in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 90,
    with_group: bool = True,
) -> list[Any]:
    """`function(rank, world_size, *args)` on each rank, with a process group unless told not to.

    `function` and `args` must be picklable: a top-level function and plain values or tensors.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    payload = pickle.dumps((function, args))
    processes, receivers = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, payload, rank, world_size, port, timeout_seconds, with_group)
        process = context.Process(target=_rank_main, args=arguments, daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        receivers.append(receiver)
    try:
        return _collect(receivers, time.monotonic() + timeout_seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    pending = dict(enumerate(receivers))
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending)} did not end in time")
        for rank in [rank for rank, receiver in pending.items() if receiver in ready]:
            try:
                succeeded, value = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not succeeded:
                raise RankError(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank_main(
    sender: Connection,
    payload: bytes,
    rank: int,
    world_size: int,
    port: int,
    timeout_seconds: float,
    with_group: bool,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        function, args = pickle.loads(payload)
        if with_group:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{ADDRESS}:{port}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
        answer = pickle.dumps((True, function(rank, world_size, *args)))
        if with_group:
            # Results are sent only when all ranks have them: the first to leave would break a slower one's.
            dist.barrier()
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()
