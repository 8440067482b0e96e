"""The kernels that apply an optimizer's step, called with tensors."""

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


def step_matrix(weight: Tensor, update: Tensor, rate: float, decay: float, cautious: bool) -> None:
    """`plain_step_matrix` of hotlap/optim/muon.py, in place."""
    assert weight.is_contiguous(), "matrices lie in memory row by row"
    update = update.contiguous()
    needed_library().step_matrix(
        *(pointer(weight), pointer(update), ctypes.c_int64(weight.numel())),
        *(ctypes.c_float(rate), ctypes.c_float(decay), int(cautious), torch.get_num_threads()),
    )
