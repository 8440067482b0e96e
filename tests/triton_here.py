"""Triton without a GPU: its interpreter and its compiler, each in a process of its own.

`TRITON_INTERPRET` is read when Triton is imported, so one process cannot have both. What needs Triton is
skipped by name where it is not installed.
"""

import importlib.util
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def triton_process(*, interpreted: bool, cache: str) -> ProcessPoolExecutor:
    """A process whose kernels run in Triton's interpreter, or go through its compiler."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_prepare, initargs=(interpreted, cache))


def _prepare(interpreted: bool, cache: str) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(interpreted))
    os.environ["TRITON_CACHE_DIR"] = cache
