"""What `hotlap train --dry-run` prints: the configuration, and roughly what the run would take here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console

from hotlap.config import Config
from hotlap.errors import DataError
from hotlap.settings import flatten, shown, to_json

if TYPE_CHECKING:
    import torch

    from hotlap.plan.estimate import Estimate
    from hotlap.plan.machine import Machine


def print_config(console: Console, config: Config, *, as_json: bool) -> None:
    if as_json:
        console.print_json(json.dumps(to_json(config)))
        return
    for name, value in flatten(config).items():
        console.print(f"{name} = {shown(value)}", markup=False, soft_wrap=True)


def estimate_lines(config: Config, processes: int) -> list[str]:
    """Time, memory and epochs, each with what it rests on."""
    from hotlap.hardware import select_device
    from hotlap.plan.estimate import estimate

    device = select_device(config.runtime.device)
    steps = f"epochs     {config.schedule.steps} steps, {described_epochs(config)}"
    if device.type not in ("cpu", "cuda"):
        return [f"time       unknown on {device.type}", steps]
    machine = machine_here(config, device, processes)
    if not machine.peak_tflops:
        return [f"time       unknown: no matmul peak is known of {machine.name}", steps]
    planned = estimate(config, machine)
    time = described_time(planned)
    if config.schedule.minutes:
        time = f"{60 * config.schedule.minutes:g} s for the whole command; the steps follow the clock"
    mib = planned.memory.peak_bytes / 2**20
    memory = f"memory     about {mib:,.0f} MiB of tensors per process, at the peak"
    return [f"time       {time}", memory, steps]


def machine_here(config: Config, device: torch.device, processes: int) -> Machine:
    from hotlap.plan.machine import cpu_machine, present_gpu

    if device.type == "cpu":
        return cpu_machine(processes, 1, precision=config.runtime.precision)
    return present_gpu(device)


def described_time(planned: Estimate) -> str:
    """From the matmul peak, which no run reaches, to what slow machines have reached."""
    import torch

    from hotlap.hardware import select_precision, usable_cores
    from hotlap.train.compile import assumed_seconds

    config, machine = planned.config, planned.machine
    fastest, slowest = planned.speed.training_s
    if machine.device == "cpu":
        dtype = select_precision(config.runtime.precision, torch.device("cpu"))
        slowest = max(slowest, assumed_seconds(config, dtype, config.runtime.threads or usable_cores()))
    return f"{fastest:,.0f} to {slowest:,.0f} s of training on {machine.name}"


def described_epochs(config: Config) -> str:
    """How often the run sees the training tokens, if its data has been prepared."""
    from hotlap.corpus.configured import data_directory
    from hotlap.data.stream import open_split

    try:
        directory = data_directory(config)
        if not directory.is_dir():
            return f"of a corpus that is prepared when the run starts ({config.data.source})"
        tokens = len(open_split(directory, "train"))
    except DataError as mistake:
        return f"of unknown data: found {mistake.found}"
    return f"{config.schedule.steps * config.batch.tokens_per_step / tokens:.2f} epochs of {tokens:,} tokens"
