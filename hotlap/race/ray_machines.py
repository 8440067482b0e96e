"""The machines of a Ray cluster: connecting to it, what a run takes of a machine, and the actor on one."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

# Before Ray is imported. Otherwise it warns that it hides GPUs from a run that takes none, and tries for a
# quarter of an hour to connect to a cluster that is gone.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")

import ray

from hotlap.config import Config
from hotlap.errors import ConfigError, RaceError
from hotlap.race.node import NodeRun, Order

SECONDS_TO_CONNECT = 10.0


@dataclass(frozen=True)
class Needs:
    """What a run takes of a machine."""

    cpus: int
    gpus: int

    def fit(self, resources: dict[str, float]) -> int:
        """How many such runs a machine with these resources takes at once."""
        count = int(resources.get("CPU", 0) // self.cpus)
        return min(count, int(resources.get("GPU", 0) // self.gpus)) if self.gpus else count


class NodeOnRay(NodeRun):
    """The actor: a run in a process of its own, on the machine that Ray has chosen."""

    def __init__(self, order: Order) -> None:
        super().__init__(order, ray.get_runtime_context().get_node_id()[:8])


def connect(address: str | None) -> None:
    """Connect to the cluster at `address`, or to the one that this machine is a part of."""
    if ray.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    place = f"at {address}" if address else "on this machine"
    try:
        if address:
            _reach(address)
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise RaceError(
            expected=f"a Ray cluster {place}, with the same versions of Ray and Python",
            found=" ".join(str(error).split()) or type(error).__name__,
            do="start one with `ray start --head`, or give --on ray=ADDRESS on one of its machines",
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray sets one that ends this process at once


def _reach(address: str) -> None:
    """Ray itself would wait for minutes for a port that nobody listens on."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=SECONDS_TO_CONNECT).close()


def machines() -> list[dict[str, float]]:
    """The resources of each machine of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def needs_of(config: Config, procs: int | None) -> Needs:
    """One GPU for each process, or as many CPUs as it has threads."""
    count, device, threads = procs or 1, config.runtime.device, config.runtime.threads
    has_gpus = any(resources.get("GPU", 0) > 0 for resources in machines())
    if device == "cuda" or (device == "auto" and has_gpus):
        return Needs(cpus=count, gpus=count)
    if not threads:
        raise ConfigError(
            expected="--threads N with --on ray, the CPUs that a process of a run takes",
            found="none",
            do="add it, such as --threads 2",
        )
    return Needs(cpus=count * threads, gpus=0)


def check_cluster(address: str | None, configs: Sequence[Config], procs: int | None) -> None:
    """Refuse a cluster that is not there, and runs of which nobody knows what they take."""
    connect(address)
    for config in configs:
        needs_of(config, procs)
