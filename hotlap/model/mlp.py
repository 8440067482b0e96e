"""The second half of a block: attention's output joins the stream, and so does what an MLP makes of that.

The MLP is a norm and two matrices with ReLU² between them. Left to autograd it would keep two tensors of
T × hidden for the backward, the largest ones of a block, and walk them six times. Here relu(h) alone is kept,
and its square is computed again. Kernels in C, where there are any, take some tokens at a time from
attention's output to the block's end, so that what lies between stays in a core's cache. Shapes: T tokens,
C width, A features of attention's output, F hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.config import ModelConfig
from hotlap.kernels.cpu import mlp as kernel
from hotlap.model.derivatives import first_derivative_only
from hotlap.model.layers import Matrix, plain_rms_norm, rms_norm
from hotlap.model.products import add_linear, linear, plain_linear, weight_gradient


def plain_add_mlp(x_TC: Tensor, expand: Tensor, out: Tensor, *attention: Tensor) -> Tensor:
    """The reference, in the dtype of x: s + relu(norm(s) · expandᵀ)² · outᵀ.

    s is x, or x + attended · projectᵀ where `attention` is attended (T, A) and project (C, A).
    """
    if attention:
        x_TC = x_TC + plain_linear(*attention)
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
def _native(
    x: Tensor, attended: Tensor, project: Tensor, expand: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kernel.Made`, of `kernel.Given`."""
    return kernel.forward(kernel.Given(x, attended, project, expand, out))


@torch.library.custom_op("hotlap::add_mlp_backward", mutates_args=())
def _native_backward(
    grad: Tensor,
    x: Tensor,
    attended: Tensor,
    project: Tensor,
    expand: Tensor,
    out: Tensor,
    inverse_rms: Tensor,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return kernel.backward(grad, kernel.Given(x, attended, project, expand, out), inverse_rms, hidden)


@_native.register_fake
def _(
    x: Tensor, attended: Tensor, project: Tensor, expand: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del project, out
    sums = x.new_empty(x.shape if attended.numel() else (0,))
    return x.new_empty(x.shape), sums, x.new_empty(len(x)), x.new_empty(len(x), len(expand))


@_native_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    attended: Tensor,
    project: Tensor,
    expand: Tensor,
    out: Tensor,
    inverse_rms: Tensor,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    del grad, inverse_rms, hidden
    of_x, of_attended, of_project, of_expand, of_out = (
        operand.new_empty(operand.shape) for operand in (x, attended, project, expand, out)
    )
    return of_x, of_attended, of_project, of_expand, of_out


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    x, attended, *weights = inputs
    _, sums, inverse_rms, hidden = output
    ctx.save_for_backward(sums if attended.numel() else x, attended, *weights, inverse_rms, hidden)
    ctx.mark_non_differentiable(sums, inverse_rms, hidden)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_TC: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_TC is None:
        return (None,) * 5
    gradients: tuple[Tensor, ...] = _native_backward(grad_TC, *ctx.saved_tensors)
    return gradients


_native.register_autograd(_autograd, setup_context=_setup_context)


def add_mlp(x_TC: Tensor, expand: Tensor, out: Tensor, *attention: Tensor) -> Tensor:
    """As the plain version, in less memory, which a compiler sees to by itself."""
    if kernel.suits(x_TC, expand, out, *attention):
        attended, project = attention or (x_TC.new_empty(0), x_TC.new_empty(0))
        y_TC: Tensor = _native(x_TC, attended, project, expand, out)[0]
        return y_TC
    if attention:
        x_TC = add_linear(x_TC, *attention)
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

    def forward(self, x_TC: Tensor, *attention: Tensor) -> Tensor:
        """x with attention's output, projected, and the MLP's added, (T, C); see `plain_add_mlp`."""
        return add_mlp(x_TC, self.expand.weight, self.out.weight, *attention)
