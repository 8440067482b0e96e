"""The kernels that apply an optimizer's step, called with tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import addresses, needed_library, pointer


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


class AdamStep(NamedTuple):
    """One tensor's step of AdamW, with `mean` and `square` of its gradients so far."""

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    rate: float  # the learning rate, over what the mean lacks
    inverse_root_correction: float  # what the root of `square` is multiplied by
    keep: float  # of the weight, before the step
    beta1: float
    beta2: float
    eps: float


class _AdamStep(ctypes.Structure):
    """`adam_step_t` of steps.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in AdamStep._fields[:4]),
        *((name, ctypes.c_float) for name in AdamStep._fields[4:]),
        ("entries", ctypes.c_int64),
    )


def step_adam(tensors: Sequence[AdamStep]) -> None:
    """AdamW's step, as torch has it, of all the tensors, in place."""
    together = [step._replace(gradient=step.gradient.contiguous()) for step in tensors]
    for step in together:
        assert len({x.shape for x in step[:4]}) == 1, f"a weight of {step.weight.shape} and others"
        assert all(x.is_contiguous() for x in step[:4]), "tensors lie in memory row by row"
    structures = (_AdamStep(*map(pointer, step[:4]), *step[4:], step.weight.numel()) for step in together)
    array = (_AdamStep * len(together))(*structures)
    needed_library().step_adam(array, len(together), torch.get_num_threads())


def step_momenta(
    gradients: Sequence[Tensor],
    momenta: Tensor,
    keep: float,
    take: float,
    of_gradient: float,
    of_momentum: float,
) -> Tensor:
    """The updates, of matrices whose momenta (count, …) become keep · momentum + take · gradient."""
    assert momenta.is_contiguous(), "momenta lie in memory one after another"
    gradients, updates = [gradient.contiguous() for gradient in gradients], torch.empty_like(momenta)
    count = len(gradients)
    needed_library().step_momenta(
        *(addresses(gradients), pointer(momenta), pointer(updates), count, _entries(momenta, count)),
        *map(ctypes.c_float, (keep, take, of_gradient, of_momentum)),
        torch.get_num_threads(),
    )
    return updates


def step_matrices(
    weights: Sequence[Tensor],
    updates: Tensor,
    rates: Sequence[float],
    decays: Sequence[float],
    cautious: bool,
) -> None:
    """`plain_step_matrix` of hotlap/optim/matrix_steps.py for each weight, in place. updates (count, …)."""
    assert all(weight.is_contiguous() for weight in weights), "matrices lie in memory row by row"
    updates, count = updates.contiguous(), len(weights)
    needed_library().step_matrices(
        *(addresses(weights), pointer(updates), _floats(rates), _floats(decays)),
        *(count, _entries(updates, count), int(cautious), torch.get_num_threads()),
    )


def _floats(values: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(values))(*values)


def _entries(stacked: Tensor, count: int) -> ctypes.c_int64:
    assert len(stacked) == count > 0, f"{count} matrices, {tuple(stacked.shape)} of another kind"
    return ctypes.c_int64(stacked[0].numel())
