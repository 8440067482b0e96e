"""The kernel that orthogonalises small matrices, called with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import kernels_take, needed_library, pointer

# A thread works on a matrix, and on what is computed from it, in its core's cache.
MOST_ENTRIES = 2**17


def suits(matrices: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel takes such matrices, computes in `dtype` and is the faster way."""
    count, rows, cols = matrices.shape
    keeps_threads_busy = count >= torch.get_num_threads() and rows * cols <= MOST_ENTRIES
    return dtype == torch.float32 and keeps_threads_busy and kernels_take(matrices)


def orthogonalize(
    matrices: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    first_segment: int,
    segment: int,
    smallest_norm: float,
) -> Tensor:
    """What hotlap/optim/newton_schulz.py does with a stack (count, rows, cols), in segments of steps."""
    kernels, threads = needed_library(), torch.get_num_threads()
    count, rows, cols = matrices.shape
    x, out = matrices.contiguous(), matrices.new_empty(matrices.shape)
    workspace = x.new_empty(threads, kernels.newton_schulz_floats(max(rows, cols), min(rows, cols)))
    flat = [value for step in coefficients for value in step]
    kernels.newton_schulz(
        *(pointer(x), count, rows, cols),
        *((ctypes.c_float * len(flat))(*flat), len(coefficients), first_segment, segment),
        *(ctypes.c_float(smallest_norm), pointer(out), pointer(workspace), threads),
    )
    return out
