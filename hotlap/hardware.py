"""Hardware detection: devices, bfloat16 support, CPU cores, measured matmul peak.

`hotlap doctor` and the run header print what these functions return.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from hotlap.errors import DeviceError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

CPUINFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroups v2: "quota period", both in microseconds

# The instruction set that oneDNN may use for torch's bfloat16 matmuls. oneDNN reads it once per process, at
# the first matmul.
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
# Passes the result of the AMX test on to child processes. They inherit the restriction above, so their own
# test would succeed and they would select bfloat16.
AMX_FAULTS_VARIABLE = "HOTLAP_AMX_FAULTS"
AMX_FAULTS = "lists AMX but faults on it"  # describes the processor in messages
TRIAL_SECONDS = 5.0  # timeout of a matmul that takes milliseconds

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
    """The device with this name. `auto` selects the fastest; a device that is missing is an error."""
    found = available_devices()
    if name == "auto":
        return torch.device(found[0])
    if name not in found:
        raise DeviceError(
            expected=f"an available device ({', '.join(found)})", found=name, do="use --device auto"
        )
    return torch.device(name)


def has_native_bf16(device: torch.device) -> bool:
    """Whether the hardware has bfloat16 matmul instructions. Emulated bfloat16 is slower than float32."""
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
    """Whether AMX instructions crash on this device. Some virtual machines list AMX but fault on its use.

    If so, this restricts oneDNN to AVX-512, in this process (unless it has already run a matmul) and in its
    children.
    """
    return device.type == "cpu" and _cpu_amx_faults()


@functools.cache
def _cpu_amx_faults() -> bool:
    if "amx_bf16" not in _cpu_flags():
        return False
    if os.environ.get(AMX_FAULTS_VARIABLE) != "1":
        if survives(_bfloat16_matmul):
            return False
        os.environ[AMX_FAULTS_VARIABLE] = "1"
    os.environ.setdefault(ISA_VARIABLE, ISA_WITHOUT_AMX)
    return True


def _bfloat16_matmul() -> None:
    torch.set_num_threads(1)  # the parent's thread pool does not survive the fork
    matrix = torch.ones(64, 64, dtype=torch.bfloat16, device="cpu")  # 16 × 16 is too small to use AMX
    torch.mm(matrix, matrix)


def survives(trial: Callable[[], object], limit_s: float = TRIAL_SECONDS) -> bool:
    """Run `trial` in a forked child. Returns whether it finished within `limit_s` without crashing."""
    import resource  # POSIX only; needed only where Linux lists AMX

    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns that a forked child of a process with threads may hang. The timeout covers that.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGILL, signal.SIG_DFL)  # faulthandler would print a traceback
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            trial()
            os.write(writing, b"survived")
        finally:
            os._exit(0)  # an exception must not propagate into the child's copy of the caller
    os.close(writing)
    with open(reading, "rb") as pipe:
        in_time = bool(select.select([pipe], [], [], limit_s)[0])
        survived = in_time and pipe.read() == b"survived"
    if not in_time:
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # already reaped if SIGCHLD is ignored
        os.waitpid(child, 0)
    return survived


def _cpuinfo(key: str) -> str:
    """The first value of a key in Linux's /proc/cpuinfo, or "" if the key or the file is missing."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def select_precision(name: str, device: torch.device) -> torch.dtype:
    """The dtype of activations. Requesting bfloat16 without hardware support is an error.

    `auto` falls back to float32 except on a GPU: there it would be many times slower than the user expects.
    """
    native = has_native_bf16(device)
    if not native and device.type == "cuda" and name != "float32":
        raise DeviceError(
            expected="a GPU with bfloat16, of compute capability 8.0 or later",
            found=f"{device_name(device)}, whose tensor cores have float16 only",
            do="use another GPU: float16 would lose small gradients. --precision float32 is correct but slow",
        )
    if name == "auto":
        return torch.bfloat16 if native else torch.float32
    if name == "bfloat16" and not native:
        found = f"a processor that {AMX_FAULTS}" if amx_faults(device) else f"{device.type} without it"
        raise DeviceError(expected="hardware bfloat16 support", found=found, do="use --precision float32")
    return getattr(torch, name)


def usable_cores() -> int:
    """Physical cores available to this process, limited by CPU affinity and by the container's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = min(allowed, psutil.cpu_count(logical=False) or allowed)
    return min(allowed, _quota_cores() or allowed)


def _quota_cores() -> int | None:
    """A container's CPU quota (docker --cpus=1.5) in cores, rounded up. None without a quota."""
    try:
        quota_us, period_us = CPU_QUOTA.read_text().split()
        return max(1, math.ceil(int(quota_us) / int(period_us)))
    except (OSError, ValueError, ZeroDivisionError):
        return None  # no such file outside a container; "max" means no quota


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads inside the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tune_malloc() -> None:
    """Make malloc keep large freed blocks, to avoid page faults on every step.

    glibc only; does nothing elsewhere.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        # -1 disables trimming. The largest threshold is 2 GiB, and large models free more than that.
        mallopt(M_TRIM_THRESHOLD, -1)


def use_expandable_segments() -> None:
    """Let the CUDA allocator grow its segments, as the records did, unless the user has configured it.

    It reads its configuration once, when CUDA is initialized. Releases of torch before 2.9 know only the name
    with CUDA in it. Later ones know both, so a user's setting under one name must not meet ours under the
    other.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True"))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """All memory of a CUDA device, free or not."""
    return torch.cuda.get_device_properties(device).total_memory


def measure_matmul_gflops(size: int = 1536, repeats: int = 4, dtype: torch.dtype = torch.float32) -> float:
    """Matmul throughput of the CPU in GFLOP/s with torch's current threads: the best of `repeats`."""
    a, b = torch.randn(2, size, size).to(dtype)
    out = torch.empty(size, size, dtype=dtype)
    torch.mm(a, b, out=out)
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * size**3 / best_s / 1e9
