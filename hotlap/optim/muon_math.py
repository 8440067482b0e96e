"""The tensor math of one Muon step: momentum, Newton-Schulz, weight update. No communication.

`PlainMath` is the reference. `Muon.math` can be replaced with another implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotlap.optim.newton_schulz import Coefficients, orthogonalize

MomentumForm = Literal["lerp", "sum"]
# As the builtin map; may compute several items at once.
Map = Callable[[Callable[[int], Tensor], Iterable[int]], Iterable[Tensor]]


@dataclass(frozen=True)
class UpdateRule:
    """How an update is computed from a gradient and the momentum; constant during training."""

    momentum_form: MomentumForm
    nesterov: bool
    coefficients: Coefficients


class PlainMath:
    def compute_updates(
        self,
        gradients: Sequence[Tensor],
        buffer: Tensor,
        momentum: float,
        rule: UpdateRule,
        parts: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Update the momentum in `buffer` (count, rows, cols) in place.

        `gradients` are `count` tensors of shape (rows, cols). Returns the updates (count, rows, cols) in
        `dtype`, in which each of the `parts` along the rows is orthogonalized on its own.
        """
        updates = self.update_momentum(gradients, buffer, rule.momentum_form, momentum, rule.nesterov)
        count, rows, cols = updates.shape
        pieces = updates.view(count * parts, rows // parts, cols)
        return self.orthogonalize(pieces, rule.coefficients, dtype).reshape(updates.shape)

    def update_momentum(
        self,
        gradients: Sequence[Tensor],
        buffer: Tensor,
        form: MomentumForm,
        momentum: float,
        nesterov: bool,
    ) -> Tensor:
        """Update `buffer` (count, rows, cols) in place. Returns the matrices to orthogonalize.

        `gradients` are `count` tensors of shape (rows, cols).
        """
        updates = torch.stack(tuple(gradients)).to(buffer.dtype)
        if form == "lerp":
            buffer.lerp_(updates, 1 - momentum)
            return updates.lerp_(buffer, momentum) if nesterov else buffer
        buffer.mul_(momentum).add_(updates)
        return updates.add_(buffer, alpha=momentum) if nesterov else buffer

    def orthogonalize(self, updates: Tensor, coefficients: Coefficients, dtype: torch.dtype) -> Tensor:
        """The approximate polar factor of each matrix of (count, rows, cols), in `dtype`."""
        return orthogonalize(updates, coefficients, dtype=dtype)

    def update_weights(
        self,
        weights: Sequence[Tensor],
        updates: Sequence[Tensor],
        rates: Sequence[float],
        decays: Sequence[float],
        cautious: bool,
    ) -> None:
        """weight −= decay · weight + rate · update, in place, per matrix.

        Cautious weight decay applies only to the entries that the update moves toward zero.
        """
        for weight, update, rate, decay in zip(weights, updates, rates, decays, strict=True):
            if decay and cautious:
                weight.sub_(weight * (weight * update > 0), alpha=decay)
            elif decay:
                weight.mul_(1 - decay)
            weight.sub_(update, alpha=rate)


class OneByOne(PlainMath):
    """Each matrix on its own: its bits do not depend on what else its rank owns and computes."""

    def __init__(self, math: PlainMath, map_matrices: Map = map) -> None:
        self.math = math
        self.map_matrices = map_matrices

    def compute_updates(
        self,
        gradients: Sequence[Tensor],
        buffer: Tensor,
        momentum: float,
        rule: UpdateRule,
        parts: int,
        dtype: torch.dtype,
    ) -> Tensor:
        def of_one(index: int) -> Tensor:
            own = buffer[index : index + 1]
            return self.math.compute_updates([gradients[index]], own, momentum, rule, parts, dtype)

        return torch.cat(list(self.map_matrices(of_one, range(len(gradients)))))

    def update_weights(
        self,
        weights: Sequence[Tensor],
        updates: Sequence[Tensor],
        rates: Sequence[float],
        decays: Sequence[float],
        cautious: bool,
    ) -> None:
        self.math.update_weights(weights, updates, rates, decays, cautious)
