"""Reference implementation of Muon: one matrix, one device, no batching, no communication.

Tests compare the fast code of this package with these functions. Nothing else uses them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.optim.newton_schulz import Coefficients


def polar_factor(matrix: Tensor) -> Tensor:
    """U·Vᵀ from the singular value decomposition, which Newton-Schulz approximates."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    factor: Tensor = u @ vh
    return factor


def newton_schulz(matrix: Tensor, coefficients: Coefficients) -> Tensor:
    x: Tensor = matrix / torch.linalg.vector_norm(matrix).clamp(min=1e-7)
    for a, b, c in coefficients:
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


def muon_step(
    weight: Tensor, gradient: Tensor, buffer: Tensor, lr: float, momentum: float, coefficients: Coefficients
) -> tuple[Tensor, Tensor]:
    """The weight and the momentum buffer after one step. The arguments are not modified."""
    rows, cols = weight.shape
    buffer = momentum * buffer + (1 - momentum) * gradient
    nesterov = momentum * buffer + (1 - momentum) * gradient
    update = newton_schulz(nesterov, coefficients)
    return weight - lr * max(1, rows / cols) ** 0.5 * update, buffer
