"""A step compiled for the GPU, without one: its memory and its launches. Minutes instead of seconds."""

from __future__ import annotations

from hotlap.config import Config
from hotlap.emulation import CompiledStep, compiled_step
from hotlap.errors import DeviceError
from hotlap.plan.machine import Machine


def exact_step(config: Config, machine: Machine) -> CompiledStep:
    """Of one process, which owns all of Muon's momentum and has no DDP around it."""
    if machine.gpu is None:
        raise DeviceError(expected="a GPU for --exact", found="cpu", do="name one with --gpu")
    return compiled_step(config, gpu=machine.gpu.name, world_size=machine.world_size)
