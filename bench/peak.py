"""The reference of the other benchmarks: the machine's current float32 matmul peak, and a best-of timer.

Speeds are reported as a fraction of the peak measured in the same run, because clock rates and other load on
the machine vary.
"""

import time
from collections.abc import Callable

import torch


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls, which is least affected by other load."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def matmul_rates(size: int = 2048, repeats: int = 5) -> list[float]:
    """FLOP/s of square float32 matmuls, with torch's current threads."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        rates.append(2 * size**3 / (time.perf_counter() - start))
    return rates


def sgemm_peak_flops() -> float:
    return max(matmul_rates())
