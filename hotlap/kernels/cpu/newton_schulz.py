"""The kernel that orthogonalizes small matrices, called with tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import ffi, needed_library
from hotlap.kernels.cpu.operands import dims, operand, pointer, structure

# A thread works on a matrix, and on what is computed from it, in its core's cache.
MOST_ENTRIES = 2**17


def orthogonalize(
    matrices: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    first_segment: int,
    segment: int,
    smallest_norm: float,
) -> Tensor:
    """As hotlap/optim/newton_schulz.py, for matrices (count, rows, cols), in segments of steps."""
    kernels, threads = needed_library(), torch.get_num_threads()
    count, rows, cols = dims("matrices", matrices, 3)
    x = operand("matrices", matrices, (count, rows, cols))
    if min(first_segment, segment) < 1:
        raise ValueError(f"segments: expected at least 1 step, found {first_segment} and {segment}")
    flat = [value for step in coefficients for value in step]
    if not coefficients or len(flat) != 3 * len(coefficients):
        raise ValueError(f"coefficients: expected some steps of 3 numbers, found {coefficients}")
    floats, out = ffi.new("float[]", flat), torch.empty_like(x)
    sizes = {"count": count, "rows": rows, "cols": cols, "steps": len(coefficients)}
    sizes |= {"first_segment": first_segment, "segment": segment}
    ns = structure(
        "hotlap_newton_schulz_t *",
        {"matrices": x},
        coefficients=floats,
        **sizes,
        smallest_norm=smallest_norm,
    )
    workspace = x.new_empty(kernels.hotlap_newton_schulz_floats(ns, threads))
    kernels.hotlap_newton_schulz(ns, pointer(out), pointer(workspace), threads)
    return out
