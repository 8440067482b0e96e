"""What a run is planned for: a kind of device, how many of them, and how they are connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from hotlap.errors import ConfigError, DeviceError
from hotlap.gpus import FIRST_BF16_CAPABILITY, Gpu, find_gpu, gpu_of_driver
from hotlap.hardware import (
    device_name,
    measure_matmul_gflops,
    memory_bytes,
    select_precision,
    usable_cores,
)

# What is left of a GPU's memory for tensors: the CUDA context, NCCL's and cuBLAS's buffers, the gaps of
# the allocator and what the driver keeps take the rest.
USABLE_GPU_FRACTION = 0.92
# The system and other programs need the rest.
USABLE_RAM_FRACTION = 0.8
# Assumed between nodes unless --link is given: one 200 Gbit/s adapter per GPU.
NETWORK_GB_PER_S = 25.0
LOOPBACK_GB_PER_S = 2.0  # of gloo between processes of one machine


@dataclass(frozen=True)
class Machine:
    name: str
    device: Literal["cuda", "cpu"]
    gpu: Gpu | None  # None for a CPU, and for a GPU that the table does not have
    memory_bytes: int  # of one device
    usable_bytes: int  # of it, for tensors
    peak_tflops: float  # of matmuls in the precision of the run
    devices_per_node: int
    nodes: int
    link_gb_per_s: float  # per device and direction
    link_name: str

    @property
    def world_size(self) -> int:
        return self.devices_per_node * self.nodes


def gpu_machine(
    name: str, gpus: int, nodes: int, link_gb_per_s: float | None = None, precision: str = "auto"
) -> Machine:
    """`gpus` are those of one node. Without a link its nominal rate is assumed."""
    gpu = find_gpu(name)
    refuse_without_bf16(gpu, precision)
    if link_gb_per_s is not None:
        link, link_name = link_gb_per_s, "--link"
    elif nodes > 1:
        link, link_name = NETWORK_GB_PER_S, "network, assumed"
    else:
        link, link_name = gpu.link_gb_per_s, gpu.link_name
    memory = int(gpu.memory_gb * 2**30)
    return Machine(
        name=gpu.name,
        device="cuda",
        gpu=gpu,
        memory_bytes=memory,
        usable_bytes=int(memory * USABLE_GPU_FRACTION),
        peak_tflops=gpu.bf16_tflops,
        devices_per_node=_positive("--gpus", gpus),
        nodes=_positive("--nodes", nodes),
        link_gb_per_s=link,
        link_name=link_name,
    )


def present_gpu(device: torch.device) -> Machine:
    """One GPU of this machine, known or not."""
    name = device_name(device)
    gpu, memory = gpu_of_driver(name), memory_bytes(device)
    return Machine(
        name=name,
        device="cuda",
        gpu=gpu,
        memory_bytes=memory,
        usable_bytes=int(memory * USABLE_GPU_FRACTION),
        peak_tflops=0.0 if gpu is None else gpu.bf16_tflops,
        devices_per_node=1,
        nodes=1,
        link_gb_per_s=0.0,
        link_name="none",
    )


def refuse_without_bf16(gpu: Gpu, precision: str) -> None:
    if gpu.capability < FIRST_BF16_CAPABILITY and precision != "float32":
        major, minor = gpu.capability
        raise DeviceError(
            expected="a GPU with bfloat16, of compute capability 8.0 or later",
            found=f"{gpu.name}, of compute capability {major}.{minor}, whose tensor cores have float16 only",
            do="use another GPU: float16 would lose small gradients. --precision float32 is correct but slow",
        )


def cpu_machine(
    processes: int, nodes: int, link_gb_per_s: float | None = None, precision: str = "auto"
) -> Machine:
    """This machine: its memory and its measured matmul peak, divided among the processes."""
    cpu = torch.device("cpu")
    torch.set_num_threads(usable_cores())
    processes = _positive("--gpus", processes)
    memory = psutil.virtual_memory().total // processes
    return Machine(
        name=device_name(cpu),
        device="cpu",
        gpu=None,
        memory_bytes=memory,
        usable_bytes=int(memory * USABLE_RAM_FRACTION),
        peak_tflops=measure_matmul_gflops(dtype=select_precision(precision, cpu)) / processes / 1e3,
        devices_per_node=processes,
        nodes=_positive("--nodes", nodes),
        link_gb_per_s=link_gb_per_s or LOOPBACK_GB_PER_S,
        link_name="--link" if link_gb_per_s else "loopback, assumed",
    )


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise ConfigError(expected=f"{option} of 1 or more", found=str(value), do="give a positive number")
    return value
