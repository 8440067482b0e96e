"""What the other benchmarks measure against: this machine's matrix-product peak, now, and a best-of timer.

Speeds are given as a fraction of a float32 peak taken in the same run, because clocks and neighbours change.
"""

import time
from collections.abc import Callable

import torch


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The fastest of several calls: what is slower was disturbed."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def product_rates(size: int = 2048, repeats: int = 5) -> list[float]:
    """Floating-point operations a second of square float32 products, on torch's current threads."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        rates.append(2 * size**3 / (time.perf_counter() - start))
    return rates


def sgemm_peak_flops() -> float:
    return max(product_rates())
