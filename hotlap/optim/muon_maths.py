"""The tensor maths of one Muon step, apart from who computes it and how it is sent: momentum, Newton-Schulz,
and the update of the weights.

`PlainMaths` defines what is computed. `Muon.maths` may be exchanged for another implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from hotlap.optim.newton_schulz import Coefficients, orthogonalize

MomentumForm = Literal["lerp", "sum"]


class PlainMaths:
    def momenta(
        self,
        gradients: Sequence[Tensor],
        buffer: Tensor,
        form: MomentumForm,
        momentum: float,
        nesterov: bool,
    ) -> Tensor:
        """Update the momenta `buffer` (count, rows, cols) in place; returns what Newton-Schulz takes."""
        updates = torch.stack(tuple(gradients)).to(buffer.dtype)
        if form == "lerp":
            buffer.lerp_(updates, 1 - momentum)
            return updates.lerp_(buffer, momentum) if nesterov else buffer
        buffer.mul_(momentum).add_(updates)
        return updates.add_(buffer, alpha=momentum) if nesterov else buffer

    def orthogonalize(self, updates: Tensor, coefficients: Coefficients, dtype: torch.dtype) -> Tensor:
        """The nearly orthogonal factor of each matrix of (count, rows, cols), computed in `dtype`."""
        return orthogonalize(updates, coefficients, dtype=dtype)

    def step(
        self,
        weights: Sequence[Tensor],
        updates: Tensor,
        rates: Sequence[float],
        decays: Sequence[float],
        cautious: bool,
    ) -> None:
        """weight −= decay · weight + rate · update, in place, for each of `updates` (count, rows, cols).

        Cautious decay spares the entries that the update moves away from zero.
        """
        for weight, update, rate, decay in zip(weights, updates, rates, decays, strict=True):
            if decay and cautious:
                weight.sub_(weight * (weight * update > 0), alpha=decay)
            elif decay:
                weight.mul_(1 - decay)
            weight.sub_(update, alpha=rate)
