"""The environment of a run: versions, hardware, git commit, selected environment variables.

Only the environment variables named here are recorded, so that no secret ends up in the files of a
run. `run.py` adds what depends on the model and the data.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

import hotlap
from hotlap import __version__, hardware
from hotlap.files import without_home
from hotlap.runs.recorded import MACHINE_VARIABLE

# Variables that affect speed or results. Full names only: a pattern could match a secret.
RECORDED_VARIABLES = (
    "CC",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GLIBC_TUNABLES",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "HOTLAP_AMX_FAULTS",
    "HOTLAP_NATIVE",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCHELASTIC_RUN_ID",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "WORLD_SIZE",
)


def describe_environment(
    *,
    device: torch.device,
    precision: torch.dtype,
    attention_backend: str,
    kernels: dict[str, str],
    compile_mode: str,
    world_size: int,
    threads: int,
) -> dict[str, Any]:
    """The part of `environment.json` that does not depend on the model or the data."""
    return {
        "hotlap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "device_name": hardware.device_name(device),
        "world_size": world_size,
        "threads": threads,
        "precision": str(precision).removeprefix("torch."),
        "attention_backend": attention_backend,
        "kernels": kernels,
        "compile": compile_mode,
        "cores": hardware.usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        **({"machine": os.environ[MACHINE_VARIABLE]} if MACHINE_VARIABLE in os.environ else {}),
        "git_commit": source_commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "variables": {
            name: without_home(os.environ[name]) for name in RECORDED_VARIABLES if name in os.environ
        },
    }


def source_commit(root: Path = Path(hotlap.__file__).parents[1]) -> str | None:
    """Git commit of this package's checkout, `-dirty` if tracked files differ; None if it is installed.

    The working directory may be a repository of anyone, and git runs programs that a repository configures.
    """
    if not (root / ".git").exists():
        return None
    configured = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
    command = ["git", *configured, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Without the variables that would lead git to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
            cwd=root,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
