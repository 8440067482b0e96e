"""Muon's Newton-Schulz iteration by a kernel in C, for small float32 matrices on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.kernels.cpu import newton_schulz
from hotlap.optim.muon_math import PlainMath
from hotlap.optim.newton_schulz import (
    GRAM_FIRST_SEGMENT,
    GRAM_SEGMENT,
    SMALLEST_NORM,
    Coefficients,
    gram_pays,
)


def pays(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the kernel is faster for a stack (count, rows, cols), computed in `dtype`.

    Each thread iterates on a matrix of its own, in its core's cache.
    """
    count, rows, cols = shape
    fits_cache = rows * cols <= newton_schulz.MOST_ENTRIES
    return dtype == torch.float32 and fits_cache and count >= torch.get_num_threads()


class KernelMath(PlainMath):
    def orthogonalize(self, updates: Tensor, coefficients: Coefficients, dtype: torch.dtype) -> Tensor:
        if not pays(updates.shape, dtype):
            return super().orthogonalize(updates, coefficients, dtype)
        segments = (GRAM_FIRST_SEGMENT, GRAM_SEGMENT) if gram_pays(updates.shape[1:], dtype) else (1, 1)
        return newton_schulz.orthogonalize(updates, coefficients, *segments, SMALLEST_NORM)
