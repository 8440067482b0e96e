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
from hotlap.model.products import linear, plain_linear, weight_gradient


def plain_relu_squared_mlp(x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
    """The reference: relu(x · expandᵀ)² · outᵀ, in the dtype of x."""
    return plain_linear(F.relu(plain_linear(x_TC, expand)).square(), out)


class _ReluSquaredMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
        ctx.weight_dtype = expand.dtype
        expand, out = expand.to(x_TC.dtype), out.to(x_TC.dtype)
        hidden = F.linear(x_TC, expand).relu_()
        ctx.save_for_backward(x_TC, expand, out, hidden)
        return F.linear(hidden.square(), out)

    @staticmethod
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TC, expand, out, hidden = ctx.saved_tensors
        # d(relu(h)²) = 2·relu(h)·dh, which is 0 where h < 0. The 2 goes to the narrow operand.
        grad_hidden = ((2 * grad_TC) @ out).mul_(hidden)
        return (
            grad_hidden @ expand,
            weight_gradient(grad_hidden, x_TC, ctx.weight_dtype),
            weight_gradient(grad_TC, hidden.square(), ctx.weight_dtype),
        )


def relu_squared_mlp(x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
    """As the plain version, in less memory, which a compiler sees to by itself."""
    if torch.compiler.is_compiling():
        return linear(F.relu(linear(x_TC, expand)).square(), out)
    result: Tensor = _ReluSquaredMLP.apply(x_TC, expand, out)  # type: ignore[no-untyped-call]
    return result


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.expand = Matrix(config.width, hidden)
        self.out = Matrix(hidden, config.width, zero=True)

    def forward(self, x_TC: Tensor) -> Tensor:
        return relu_squared_mlp(x_TC, self.expand.weight, self.out.weight)
