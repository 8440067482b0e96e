"""AdamW by a kernel in C, in one call for all tensors.

torch's fused Adam takes a call a group, and at `nano` almost as long to prepare them as for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hotlap.kernels.cpu import steps


class KernelAdam(torch.optim.AdamW):
    """torch's AdamW, with the same state, for float32 tensors on a CPU that has kernels."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, betas=betas, eps=eps)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "gradients are computed before the step"
        steps.step_adam(
            [self._prepared(tensor, group) for group in self.param_groups for tensor in group["params"]]
        )
        return None

    def _prepared(self, tensor: Tensor, group: dict[str, Any]) -> steps.AdamStep:
        assert tensor.grad is not None, "a gradient for every tensor"
        state, (beta1, beta2) = self.state[tensor], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        state["step"] += 1
        count = state["step"].item()
        return steps.AdamStep(
            weight=tensor,
            gradient=tensor.grad,
            mean=state["exp_avg"],
            square=state["exp_avg_sq"],
            # Early on, the moments are still too small by these.
            rate=group["lr"] / (1 - beta1**count),
            inverse_root_correction=(1 - beta2**count) ** -0.5,
            keep=1 - group["lr"] * group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
        )
