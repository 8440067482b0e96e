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


class KernelMath(PlainMath):
    def orthogonalize(self, updates: Tensor, coefficients: Coefficients, dtype: torch.dtype) -> Tensor:
        count, rows, cols = updates.shape
        # One thread iterates on one matrix in its core's cache.
        in_cache = count >= torch.get_num_threads() and rows * cols <= newton_schulz.MOST_ENTRIES
        if dtype != torch.float32 or not in_cache:
            return super().orthogonalize(updates, coefficients, dtype)
        segments = (GRAM_FIRST_SEGMENT, GRAM_SEGMENT) if gram_pays(updates.shape[1:], dtype) else (1, 1)
        return newton_schulz.orthogonalize(updates, coefficients, *segments, SMALLEST_NORM)
