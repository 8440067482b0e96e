"""The block's MLP, with ReLU² between its two matrices.

Left to autograd it would keep two tensors of T × hidden for the backward, the largest ones of a block, and
walk them six times. Here relu(h) alone is kept, and its square is computed again. Shapes: T tokens, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.config import ModelConfig
from hotlap.model.layers import Matrix


def plain_relu_squared_mlp(x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
    """The reference: relu(x · expandᵀ)² · outᵀ."""
    return F.linear(F.relu(F.linear(x_TC, expand)).square(), out)


class _ReluSquaredMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
        hidden = F.linear(x_TC, expand).relu_()
        ctx.save_for_backward(x_TC, expand, out, hidden)
        return F.linear(hidden.square(), out)

    @staticmethod
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TC, expand, out, hidden = ctx.saved_tensors
        # d(relu(h)²) = 2·relu(h)·dh, which is 0 where h < 0. The 2 goes to the narrow operand.
        grad_hidden = ((2 * grad_TC) @ out).mul_(hidden)
        return grad_hidden @ expand, grad_hidden.T @ x_TC, grad_TC.T @ hidden.square()


def relu_squared_mlp(x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
    """As the plain version, in less memory; matrices in the dtype of x. A compiler does it by itself."""
    if torch.compiler.is_compiling():
        return plain_relu_squared_mlp(x_TC, expand, out)
    result: Tensor = _ReluSquaredMLP.apply(x_TC, expand, out)  # type: ignore[no-untyped-call]
    return result


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.expand = Matrix(config.width, hidden)
        self.out = Matrix(hidden, config.width, zero=True)

    def forward(self, x_TC: Tensor) -> Tensor:
        return relu_squared_mlp(x_TC, self.expand.weight.to(x_TC.dtype), self.out.weight.to(x_TC.dtype))
