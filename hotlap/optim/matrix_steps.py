"""What Muon does with a matrix before and after it is orthogonalised: momentum, and the step itself.

The plain versions define what is computed; hotlap/kernels/steps.py does it in one pass, on a CPU in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

MomentumForm = Literal["lerp", "sum"]


def plain_momenta(
    gradients: Sequence[Tensor], buffer: Tensor, form: MomentumForm, momentum: float, nesterov: bool
) -> Tensor:
    """The reference: the updates, of matrices whose momenta lie in `buffer` (count, rows, cols)."""
    updates = torch.stack(tuple(gradients)).to(buffer.dtype)
    if form == "lerp":
        buffer.lerp_(updates, 1 - momentum)
        return updates.lerp_(buffer, momentum) if nesterov else buffer
    buffer.mul_(momentum).add_(updates)
    return updates.add_(buffer, alpha=momentum) if nesterov else buffer


def momentum_weights(
    form: MomentumForm, momentum: float, nesterov: bool
) -> tuple[float, float, float, float]:
    """The same as weights: of buffer and gradient in the new buffer, of gradient and buffer in the update."""
    taken = 1 - momentum if form == "lerp" else 1.0
    return (momentum, taken, taken, momentum) if nesterov else (momentum, taken, 0.0, 1.0)


def plain_step_matrix(weight: Tensor, update: Tensor, rate: float, decay: float, cautious: bool) -> None:
    """The reference. Cautious decay spares the weights that the update moves away from zero."""
    if decay and cautious:
        weight.sub_(weight * (weight * update > 0), alpha=decay)
    elif decay:
        weight.mul_(1 - decay)
    weight.sub_(update, alpha=rate)
