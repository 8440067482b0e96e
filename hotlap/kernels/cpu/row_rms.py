"""The kernel of RowRms's step, called with tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import needed_library
from hotlap.kernels.cpu.operands import dims, in_place, operand, pointer


def step_rows(
    table: Tensor, grad: Tensor, squares: Tensor, lr: float, beta2: float, correction: float, eps: float
) -> None:
    """`step_rows` of hotlap/optim/row_rms.py, in place; skips the rows without a gradient."""
    rows, cols = dims("table", table, 2)
    in_place("table", table, (rows, cols))
    in_place("squares", squares, (rows, cols))
    grad = operand("grad", grad, (rows, cols))
    needed_library().hotlap_step_rows(
        *(pointer(table), pointer(grad), pointer(squares), rows, cols),
        *(lr, beta2, 1 / correction, eps, torch.get_num_threads()),
    )
