"""The memory of a step by compiling it for the GPU, without one: minutes instead of seconds."""

from __future__ import annotations

from hotlap.config import Config
from hotlap.errors import DeviceError
from hotlap.plan.machine import Machine


def compiled_peak_mib(config: Config, machine: Machine) -> float:
    """Peak memory of one process that allocates what the compiled step does, in MiB.

    It owns all of Muon's momentum and has no DDP around it.
    """
    if machine.gpu is None:
        raise DeviceError(expected="a GPU for --exact", found="cpu", do="name one with --gpu")
    from hotlap.emulation.compiled_step import compiled_step

    return compiled_step(config, gpu=machine.gpu.name, world_size=machine.world_size).peak_mib
