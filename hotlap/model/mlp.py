"""The block's MLP: norm, two matrices with ReLU² between them, and the sum with what it was given.

Left to autograd it would keep two tensors of T × hidden for the backward, the largest ones of a block, and
walk them six times. Here relu(h) alone is kept, and its square is computed again. Kernels in C, where there
are any, take some tokens at a time from the norm to the sum, so that what lies between stays in a core's
cache. Shapes: T tokens, C width, F hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.config import ModelConfig
from hotlap.kernels import mlp as kernel
from hotlap.model.derivatives import first_derivative_only
from hotlap.model.layers import Matrix, plain_rms_norm, rms_norm
from hotlap.model.products import linear, plain_linear, weight_gradient


def plain_add_mlp(x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
    """The reference: x + relu(norm(x) · expandᵀ)² · outᵀ, in the dtype of x."""
    return x_TC + plain_linear(F.relu(plain_linear(plain_rms_norm(x_TC), expand)).square(), out)


class _ReluSquaredMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
        ctx.weight_dtype = expand.dtype
        expand, out = expand.to(x_TC.dtype), out.to(x_TC.dtype)
        hidden = F.linear(x_TC, expand).relu_()
        ctx.save_for_backward(x_TC, expand, out, hidden)
        return F.linear(hidden.square(), out)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TC, expand, out, hidden = ctx.saved_tensors
        # d(relu(h)²) = 2·relu(h)·dh, which is 0 where h < 0. The 2 goes to the narrow operand.
        grad_hidden = ((2 * grad_TC) @ out).mul_(hidden)
        return (
            grad_hidden @ expand,
            weight_gradient(grad_hidden, x_TC, ctx.weight_dtype),
            weight_gradient(grad_TC, hidden.square(), ctx.weight_dtype),
        )


# One opaque node for the compiler.
@torch.library.custom_op("hotlap::add_mlp", mutates_args=())
def _native(x_TC: Tensor, expand: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and for the backward 1 / RMS of x, (T,), and relu(h), (T, F)."""
    return kernel.forward(x_TC, expand, out)


@torch.library.custom_op("hotlap::add_mlp_backward", mutates_args=())
def _native_backward(
    grad_TC: Tensor, x_TC: Tensor, expand: Tensor, out: Tensor, inverse_rms_T: Tensor, hidden_TF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return kernel.backward(grad_TC, x_TC, expand, out, inverse_rms_T, hidden_TF)


@_native.register_fake
def _(x_TC: Tensor, expand: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    del out
    return x_TC.new_empty(x_TC.shape), x_TC.new_empty(len(x_TC)), x_TC.new_empty(len(x_TC), len(expand))


@_native_backward.register_fake
def _(
    grad_TC: Tensor, x_TC: Tensor, expand: Tensor, out: Tensor, inverse_rms_T: Tensor, hidden_TF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del grad_TC, inverse_rms_T, hidden_TF
    return x_TC.new_empty(x_TC.shape), expand.new_empty(expand.shape), out.new_empty(out.shape)


def _setup_context(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, inverse_rms_T, hidden_TF = output
    ctx.save_for_backward(*inputs, inverse_rms_T, hidden_TF)
    ctx.mark_non_differentiable(inverse_rms_T, hidden_TF)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_TC: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_TC is None:
        return (None,) * 3
    gradients: tuple[Tensor, ...] = _native_backward(grad_TC, *ctx.saved_tensors)
    return gradients


_native.register_autograd(_autograd, setup_context=_setup_context)


def add_mlp(x_TC: Tensor, expand: Tensor, out: Tensor) -> Tensor:
    """As the plain version, in less memory, which a compiler sees to by itself."""
    if kernel.suits(x_TC, expand, out):
        y_TC: Tensor = _native(x_TC, expand, out)[0]
        return y_TC
    normed = rms_norm(x_TC)
    if torch.compiler.is_compiling():
        return x_TC + linear(F.relu(linear(normed, expand)).square(), out)
    result: Tensor = _ReluSquaredMLP.apply(normed, expand, out)  # type: ignore[no-untyped-call]
    return x_TC + result


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.expand = Matrix(config.width, hidden)
        self.out = Matrix(hidden, config.width, zero=True)

    def forward(self, x_TC: Tensor) -> Tensor:
        """x with the MLP's output added, (T, C)."""
        return add_mlp(x_TC, self.expand.weight, self.out.weight)
