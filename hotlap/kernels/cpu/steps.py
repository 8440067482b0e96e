"""The kernels that apply an optimizer's step in place, called with tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import ffi, needed_library
from hotlap.kernels.cpu.operands import dims, in_place, operand, pointer


def step_rows(
    table: Tensor, grad: Tensor, squares: Tensor, lr: float, beta2: float, correction: float, eps: float
) -> None:
    """`plain_step_rows` of hotlap/optim/row_rms.py; skips the rows without a gradient."""
    rows, cols = dims("table", table, 2)
    in_place("table", table, (rows, cols))
    in_place("squares", squares, (rows, cols))
    grad = operand("grad", grad, (rows, cols))
    needed_library().hotlap_step_rows(
        *(pointer(table), pointer(grad), pointer(squares), rows, cols),
        *(lr, beta2, 1 / correction, eps, torch.get_num_threads()),
    )


class AdamStep(NamedTuple):
    """One tensor's step of AdamW: fields of `hotlap_adam_step_t`. mean, square: running moments."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    rate: float  # lr / (1 − beta1^step)
    inverse_root_correction: float  # (1 − beta2^step)^−½
    keep: float  # 1 − lr · weight_decay
    beta1: float
    beta2: float
    eps: float


def step_adam(tensors: Sequence[AdamStep]) -> None:
    """AdamW's step, as torch's, of all the tensors. One without elements is left out."""
    checked = [_checked_adam_step(step) for step in tensors if step.weight.numel()]
    if not checked:
        return
    structures = [
        (*map(pointer, step[:4]), *step[4:], step.weight.numel())  # in the order of the C struct
        for step in checked
    ]
    array = ffi.new("hotlap_adam_step_t[]", structures)
    needed_library().hotlap_step_adam(array, len(checked), torch.get_num_threads())


def _checked_adam_step(step: AdamStep) -> AdamStep:
    shape = step.weight.shape
    for name, x in (("weight", step.weight), ("mean", step.mean), ("square", step.square)):
        in_place(name, x, shape)
    gradient = operand("gradient", step.gradient, shape)
    return step if gradient is step.gradient else step._replace(gradient=gradient)


def step_momenta(
    gradients: Sequence[Tensor],
    momenta: Tensor,
    keep: float,
    take: float,
    of_gradient: float,
    of_momentum: float,
) -> Tensor:
    """momentum = keep · momentum + take · gradient, for each of momenta (count, …).

    Returns the updates of_gradient · gradient + of_momentum · momentum, (count, …).
    """
    count, shape = len(gradients), momenta.shape[1:]
    in_place("momenta", momenta, (count, *shape))
    gradients = [operand("gradients", x, shape) for x in gradients]
    updates = torch.empty_like(momenta)
    needed_library().hotlap_step_momenta(
        *([pointer(x) for x in gradients], pointer(momenta), pointer(updates)),
        *(count, momenta.numel() // count, keep, take, of_gradient, of_momentum, torch.get_num_threads()),
    )
    return updates


def step_matrices(
    weights: Sequence[Tensor],
    updates: Tensor,
    rates: Sequence[float],
    decays: Sequence[float],
    cautious: bool,
) -> None:
    """`plain_step_matrix` of hotlap/optim/matrix_steps.py for each weight. updates (count, …)."""
    count, shape = len(weights), updates.shape[1:]
    updates = operand("updates", updates, (count, *shape))
    for weight in weights:
        in_place("weights", weight, shape)
    if not len(rates) == len(decays) == count:
        raise ValueError(f"rates, decays: expected {count} of each, found {len(rates)} and {len(decays)}")
    needed_library().hotlap_step_matrices(
        *([pointer(x) for x in weights], pointer(updates), list(rates), list(decays)),
        *(count, updates.numel() // count, int(cautious), torch.get_num_threads()),
    )
