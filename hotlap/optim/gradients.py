"""Gradient checks and clipping before an optimizer step. Errors name the parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hotlap.errors import OptimizerError

_MAX_NAMES = 3


def check_gradients(parameters: Mapping[str, Tensor], check_finite: bool | None = None) -> None:
    """Raise an error that names the parameters whose gradient is missing or not finite.

    The finite check reads every gradient and synchronizes with the device. By default it runs only
    on the CPU, where there is nothing to synchronize with.
    """
    gradients = {name: tensor.grad for name, tensor in parameters.items() if tensor.grad is not None}
    if len(gradients) < len(parameters):
        raise OptimizerError(
            expected="a gradient for every parameter",
            found=f"none for {_format_names(name for name in parameters if name not in gradients)}",
            do="call backward() before step(), and pass only parameters that the loss depends on",
        )
    if check_finite is None:
        check_finite = all(gradient.device.type == "cpu" for gradient in gradients.values())
    if check_finite:
        _check_finite_entries(gradients)


def _check_finite_entries(gradients: Mapping[str, Tensor]) -> None:
    # One NaN or infinity makes the sum non-finite. A sum of finite entries can overflow as well, so
    # a non-finite sum is only a reason to check the entries.
    sums = torch.stack([gradient.sum() for gradient in gradients.values()])
    if bool(sums.isfinite().all()):
        return
    broken = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if broken:
        raise OptimizerError(
            expected="finite gradients",
            found=f"NaN or infinity in the gradient of {_format_names(broken)}",
            do="lower the learning rate, or find the first step whose loss is not finite",
        )


@torch.no_grad()
def clip_global_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients down to a global norm of `max_norm`; None leaves them unchanged.

    Returns the norm before clipping. Clipping happens before momentum. The size of Muon's update
    does not depend on the size of the gradient, so for Muon clipping only changes how much this
    step contributes to the momentum.
    """
    gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    if max_norm is not None:
        # Multiply even if the factor is 1: branching on it would synchronize with the device.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def _format_names(names: Iterable[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    more = f" and {len(quoted) - _MAX_NAMES} more" if len(quoted) > _MAX_NAMES else ""
    return ", ".join(quoted[:_MAX_NAMES]) + more
