"""The kernel that updates the rows of a table, called with tensors."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hotlap.kernels.compiled import needed_library, pointer


def step_rows(
    table: Tensor, grad: Tensor, squares: Tensor, lr: float, beta2: float, correction: float, eps: float
) -> None:
    """`plain_step_rows` of hotlap/optim/row_rms.py, in place; passes over rows without a gradient."""
    assert all(x.is_contiguous() for x in (table, squares)), "tables lie in memory row by row"
    grad = grad.contiguous()
    needed_library().step_rows(
        *(pointer(x) for x in (table, grad, squares)),
        *table.shape,
        *(ctypes.c_float(x) for x in (lr, beta2, 1 / correction, eps)),
        torch.get_num_threads(),
    )
