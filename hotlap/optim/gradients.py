"""What is done to gradients before an optimizer takes them: checks that name the culprit, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hotlap.errors import OptimizerError

_NAMED_AT_MOST = 3


def check_gradients(parameters: Mapping[str, Tensor], check_finite: bool | None = None) -> None:
    """Refuse a missing gradient, and one with NaN or infinity, by name.

    The second costs a pass over the gradients and a wait for the device. By default it is done only where
    there is nothing to wait for: on the CPU.
    """
    gradients = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
    if len(gradients) < len(parameters):
        raise OptimizerError(
            expected="a gradient for every parameter",
            found=f"none for {_listed(name for name in parameters if name not in gradients)}",
            do="call backward() before step(), and give the optimizer only what the loss depends on",
        )
    if check_finite is None:
        check_finite = all(gradient.device.type == "cpu" for gradient in gradients.values())
    if check_finite:
        _require_finite(gradients)


def _require_finite(gradients: Mapping[str, Tensor]) -> None:
    # A sum is not finite if an entry is not. It may also overflow, so only the slow test accuses.
    sums = torch.stack([gradient.sum() for gradient in gradients.values()])
    if bool(sums.isfinite().all()):
        return
    broken = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if broken:
        raise OptimizerError(
            expected="finite gradients",
            found=f"NaN or infinity in that of {_listed(broken)}",
            do="lower the learning rate, or look for the first step whose loss is not finite",
        )


@torch.no_grad()
def clip_global_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """The norm of all gradients together; those above `max_norm` are scaled down to it, None only measures.

    Acts before momentum. Muon's update has the same size whatever the gradient's, so there clipping changes
    only how much this step weighs in the momentum.
    """
    gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    if max_norm is not None:
        # Multiplied even by one: a comparison would wait for the device.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def _listed(names: Iterable[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    more = f" and {len(quoted) - _NAMED_AT_MOST} more" if len(quoted) > _NAMED_AT_MOST else ""
    return ", ".join(quoted[:_NAMED_AT_MOST]) + more
