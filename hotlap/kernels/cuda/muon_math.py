"""Muon's math on CUDA, compiled into few kernels: momentum and norms around the matmuls of Newton-Schulz, and
the update of all weights of a chunk.

Learning rate and momentum change in every step. As constants of the compiled code they would recompile it
each time, so they are 0-dim tensors on the host: the compiled code passes them to its kernels by value,
without a copy to the device and without waiting for it. What is compiled once per stack or chunk of given
shapes then serves a whole schedule. `PlainMath` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotlap.optim.muon_math import PlainMath, UpdateRule
from hotlap.optim.newton_schulz import orthogonalize

# Shapes of stacks and of chunks for which one function may be compiled. Beyond torch's default of 8 it would
# refuse to compile; a model has a few shapes, and chunks mix them in few ways.
MOST_SHAPES = 64


class CompiledMath(PlainMath):
    def __init__(self) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SHAPES)
        self._compute_updates = _compiled(_compute_updates)
        self._update_weights = _compiled(_update_weights)

    def compute_updates(
        self,
        gradients: Sequence[Tensor],
        buffer: Tensor,
        momentum: float,
        rule: UpdateRule,
        parts: int,
        dtype: torch.dtype,
    ) -> Tensor:
        updates: Tensor = self._compute_updates(
            list(gradients), buffer, torch.tensor(momentum), rule, parts, dtype
        )
        return updates

    def update_weights(
        self,
        weights: Sequence[Tensor],
        updates: Sequence[Tensor],
        rates: Sequence[float],
        decays: Sequence[float],
        cautious: bool,
    ) -> None:
        scalars = [[torch.tensor(value) for value in values] for values in (rates, decays)]
        self._update_weights(list(weights), list(updates), *scalars, cautious)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _compute_updates(
    gradients: list[Tensor],
    buffer: Tensor,
    momentum: Tensor,
    rule: UpdateRule,
    parts: int,
    dtype: torch.dtype,
) -> Tensor:
    gradient = torch.stack(gradients).to(buffer.dtype)
    if rule.momentum_form == "lerp":
        moved = buffer + (1 - momentum) * (gradient - buffer)
        updates = gradient + momentum * (moved - gradient) if rule.nesterov else moved
    else:
        moved = momentum * buffer + gradient
        updates = gradient + momentum * moved if rule.nesterov else moved
    buffer.copy_(moved)
    count, rows, cols = updates.shape
    pieces = updates.view(count * parts, rows // parts, cols)
    return orthogonalize(pieces, rule.coefficients, dtype=dtype).reshape(updates.shape)


def _update_weights(
    weights: list[Tensor], updates: list[Tensor], rates: list[Tensor], decays: list[Tensor], cautious: bool
) -> None:
    kept, steps = [], []
    for weight, update, rate, decay in zip(weights, updates, rates, decays, strict=True):
        # At least float32: a 0-dim tensor does not promote bfloat16.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        old, step = weight.to(dtype), update.to(dtype)
        decayed = old * (old * step > 0) if cautious else old
        kept.append(old - decay * decayed)
        steps.append(rate * step)
    # The weights share no data. Only an operator on lists makes the compiler update them by one kernel.
    torch._foreach_copy_(weights, torch._foreach_sub(kept, steps))
