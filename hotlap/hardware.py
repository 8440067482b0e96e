"""What this machine has and what a run on it should use: device, precision, threads, measured peak.

Nothing here trains or allocates for long; `hotlap doctor` and the run header print what it finds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import select
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from hotlap.errors import DeviceError

CPUINFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of cgroups v2: microseconds of CPU time, and in how many

# The most that oneDNN may use, which multiplies bfloat16 for torch; read once, at a process's first product.
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
# Set for the processes that this one starts. Kept off AMX they would find nothing wrong, and take bfloat16.
AMX_FAULTS_VARIABLE = "HOTLAP_AMX_FAULTS"
AMX_FAULTS = "lists AMX but faults on it"  # a processor that does, in messages
TRIAL_SECONDS = 5.0  # for a product that takes milliseconds

# glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def available_devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found.insert(0, "cuda")
    if torch.backends.mps.is_available():
        found.insert(0, "mps")
    return found


def select_device(name: str) -> torch.device:
    """`auto` is the fastest there is; a device that is not there is an error, never another device."""
    found = available_devices()
    if name == "auto":
        return torch.device(found[0])
    if name not in found:
        raise DeviceError(
            expected=f"a device of this machine ({', '.join(found)})", found=name, do="use --device auto"
        )
    return torch.device(name)


def has_native_bf16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products run on hardware made for them, rather than emulated and slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and _cpu_has_bf16() and not amx_faults(device)


def _cpu_has_bf16() -> bool:
    if platform.system() == "Darwin":
        query = subprocess.run(["sysctl", "-n", "hw.optional.arm.FEAT_BF16"], capture_output=True, text=True)
        return query.stdout.strip() == "1"
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_cpu_flags())


def _cpu_flags() -> list[str]:
    return (_cpuinfo("flags") or _cpuinfo("Features")).split()


def amx_faults(device: torch.device) -> bool:
    """Whether products on this device would die of AMX, which some virtual machines list and do not let run.

    Where they would, oneDNN is kept off it from here on: in this process, unless it has multiplied before,
    and in those that it starts.
    """
    return device.type == "cpu" and _cpu_amx_faults()


@functools.cache
def _cpu_amx_faults() -> bool:
    if "amx_bf16" not in _cpu_flags():
        return False
    if os.environ.get(AMX_FAULTS_VARIABLE) != "1":
        if survives(_bfloat16_product):
            return False
        os.environ[AMX_FAULTS_VARIABLE] = "1"
    os.environ.setdefault(ISA_VARIABLE, ISA_WITHOUT_AMX)
    return True


def _bfloat16_product() -> None:
    torch.set_num_threads(1)  # those of the process that was forked are not there
    matrix = torch.ones(64, 64, dtype=torch.bfloat16, device="cpu")  # 16 × 16 would not reach AMX
    torch.mm(matrix, matrix)


def survives(trial: Callable[[], object], limit_s: float = TRIAL_SECONDS) -> bool:
    """Whether a process gets through `trial` in time: a silent copy of this one, whose death harms nobody."""
    import resource  # not on all systems, and needed only where Linux lists AMX

    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: a copy of a process with threads may hang. Then it is out of time.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGILL, signal.SIG_DFL)  # faulthandler would print a traceback
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            trial()
            os.write(writing, b"survived")
        finally:
            os._exit(0)  # whatever was raised must not go on in a copy of the caller
    os.close(writing)
    with open(reading, "rb") as pipe:
        in_time = bool(select.select([pipe], [], [], limit_s)[0])
        survived = in_time and pipe.read() == b"survived"
    if not in_time:
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, the system has taken it away
        os.waitpid(child, 0)
    return survived


def _cpuinfo(key: str) -> str:
    """The first value of a key in Linux's /proc/cpuinfo, or nothing where there is no such file."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def select_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of activations. Asking for bfloat16 where it is not native is an error: float32 is faster."""
    native = has_native_bf16(device)
    if name == "auto":
        return torch.bfloat16 if native else torch.float32
    if name == "bfloat16" and not native:
        found = f"a processor that {AMX_FAULTS}" if amx_faults(device) else f"{device.type} without it"
        raise DeviceError(expected="hardware with bfloat16", found=found, do="use --precision float32")
    return getattr(torch, name)


def usable_cores() -> int:
    """Physical cores that this process may run on, or as many as its share of their time amounts to."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = min(allowed, psutil.cpu_count(logical=False) or allowed)
    return min(allowed, _quota_cores() or allowed)


def _quota_cores() -> int | None:
    """What a container's limit on CPU time (docker --cpus=1.5) amounts to, rounded up; None without one."""
    try:
        quota_us, period_us = CPU_QUOTA.read_text().split()
        return max(1, math.ceil(int(quota_us) / int(period_us)))
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such file, as outside of a container, or "max" in it


def tune_malloc() -> None:
    """Keep big freed blocks instead of giving them back to the kernel and faulting them in again each step.

    glibc only; elsewhere the allocator is left as it is.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        # Never: any number of bytes is at most 2 GiB, and large models free more.
        mallopt(M_TRIM_THRESHOLD, -1)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def measure_matmul_gflops(size: int = 1536, repeats: int = 4, dtype: torch.dtype = torch.float32) -> float:
    """Matrix-product rate of the CPU with torch's current threads: the best of a few products."""
    a, b = torch.randn(2, size, size).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    torch.mm(a, b, out=out)
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size**3 / best_s / 1e9
