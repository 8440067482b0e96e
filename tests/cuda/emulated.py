"""Runs programs on an emulated GPU that computes values, each in a process of its own.

`host_device.cpp` is a `cuda:0` in the memory of the CPU, on which Triton's interpreter runs the kernels that
Inductor writes for a GPU. Both have to be there before torch is imported, which `site/sitecustomize.py` sees
to. What is replaced in torch and Triton stands in `torch_interfaces.py`. Speed, races between streams and the
rounding of tensor cores do not show here.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hotlap.emulation import unavailable
from hotlap.emulation.device import compiled
from hotlap.files import cache_directory, lock, make_directory
from tests.cuda.host_device import SOURCE
from tests.cuda.process import INTERPRETER_VARIABLE, Emulation

ROOT = Path(__file__).parents[2]
MISSING = unavailable()
needs_emulation = pytest.mark.skipif(MISSING is not None, reason=f"no emulated CUDA device: {MISSING}")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    steps: list[dict[str, Any]]  # what was counted inside each `Trainer.update`


# `python -m hotlap` without Python's own shutdown: about one time in twelve, threads that torch has started
# for a device that it takes for a GPU abort it.
HOTLAP = """
import os, sys
from hotlap.cli import main

try:
    main()
except SystemExit as end:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code)
"""


def hotlap_on_cuda(
    *arguments: str,
    cwd: Path,
    interpreted: bool = False,
    accidents: Mapping[int, str] | None = None,
    gpu: str = "H100",
    **variables: str,
) -> Outcome:
    """`python -m hotlap` as a user starts it, on a machine that seems to have a GPU.

    `interpreted`: Triton kernels run, in Triton's interpreter. `accidents`: what happens before a step, see
    `Emulation`.
    """
    report = cwd / "steps.jsonl"
    report.unlink(missing_ok=True)
    happening = {str(step): what for step, what in (accidents or {}).items()}
    emulation = Emulation(str(report), happening, gpu=gpu)
    words = ("-c", HOTLAP, *arguments)
    done = run_on_cuda(*words, cwd=cwd, interpreted=interpreted, emulation=emulation, **variables)
    lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    return Outcome(done.returncode, done.stdout, done.stderr, [json.loads(line) for line in lines])


def run_on_cuda(
    *words: str, cwd: Path, interpreted: bool = False, emulation: Emulation | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python` with these arguments, on the emulated device."""
    compile_device()
    paths = [str(ROOT / "tests" / "cuda" / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONFAULTHANDLER": "1",
            INTERPRETER_VARIABLE: str(int(interpreted)),
            **(emulation or Emulation()).variables(),
            **variables,
        },
        capture_output=True,
        text=True,
    )


@functools.cache
def compile_device() -> None:
    """Half a minute, once for all of pytest's workers."""
    make_directory(cache_directory())
    with lock(cache_directory() / "host_device.lock", when_held=lambda _: None):
        compiled(SOURCE)
