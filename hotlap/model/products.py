"""Matrix products of one packed sequence, laid out so that each CPU thread stays with its own tokens.

What passes over an activation gives each thread a run of tokens, and what a thread has written is in its own
core's cache. A library's product over all tokens may cut elsewhere and fetch half of its operands from the
other core, which takes up to twice as long. Here such a product is a batch of one part a thread. Shapes:
T tokens, C width, N outputs, P parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hotlap.kernels.cpu.shares import LEAST_TOKENS_A_THREAD, least_tokens_a_share, num_threads


def token_parts(x_TC: Tensor, least_tokens: int = LEAST_TOKENS_A_THREAD) -> int:
    """How many equal runs of tokens a product is cut into: one a thread, or 1 where that would not pay."""
    threads = num_threads()
    cut = x_TC.device.type == "cpu" and len(x_TC) % threads == 0 and len(x_TC) >= threads * least_tokens
    return threads if cut else 1


def weight_gradient(grad_TN: Tensor, x_TC: Tensor, dtype: torch.dtype) -> Tensor:
    """gradᵀ · x, (N, C): the parts' sums over their own tokens, added up in `dtype`."""
    parts = token_parts(x_TC, least_tokens_a_share(grad_TN.shape[1], x_TC.shape[1]))
    if parts == 1:
        return (grad_TN.T @ x_TC).to(dtype)
    grad_PTN, x_PTC = grad_TN.unflatten(0, (parts, -1)), x_TC.unflatten(0, (parts, -1))
    return (grad_PTN.transpose(1, 2) @ x_PTC).sum(dim=0, dtype=dtype)


def plain_linear(x_TC: Tensor, weight_NC: Tensor) -> Tensor:
    """The reference: x · weightᵀ in the dtype of x."""
    return F.linear(x_TC, weight_NC.to(x_TC.dtype))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        # Not the cast weights, which a second derivative would take for constants.
        ctx.save_for_backward(x_TC, *weights)
        return tuple(plain_linear(x_TC, weight_NC) for weight_NC in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, *weights = ctx.saved_tensors
        needs_x, *need_weights = ctx.needs_input_grad
        grad_x = None
        if needs_x:
            casts = [weight_NC.to(x_TC.dtype) for weight_NC in weights]
            grad_x = grads[0] @ casts[0]
            # Added up by the products themselves: no pass over two sums for each.
            for grad_TN, weight_NC in zip(grads[1:], casts[1:], strict=True):
                grad_x = grad_x.addmm_(grad_TN, weight_NC)
        return grad_x, *(
            weight_gradient(grad_TN, x_TC, weight_NC.dtype) if needed else None
            for grad_TN, weight_NC, needed in zip(grads, weights, need_weights, strict=True)
        )


def linears(x_TC: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The plain version for each weight (N, C); on a CPU with several threads their gradients come sooner."""
    if token_parts(x_TC) == 1:
        return tuple(plain_linear(x_TC, weight_NC) for weight_NC in weights)
    results: tuple[Tensor, ...] = _Linears.apply(x_TC, *weights)  # type: ignore[no-untyped-call]
    return results


def linear(x_TC: Tensor, weight_NC: Tensor) -> Tensor:
    return linears(x_TC, weight_NC)[0]


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sum_TN: Tensor, x_TC: Tensor, weight_NC: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_NC)
        return torch.addmm(sum_TN, x_TC, weight_NC.to(x_TC.dtype).T)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TC, weight_NC = ctx.saved_tensors
        grad_x = grad_TN @ weight_NC.to(grad_TN.dtype)
        return grad_TN, grad_x, weight_gradient(grad_TN, x_TC, weight_NC.dtype)


def add_linear(sum_TN: Tensor, x_TC: Tensor, weight_NC: Tensor) -> Tensor:
    """sum + x · weightᵀ, where a CPU need not pass over the product to add it."""
    if x_TC.device.type != "cpu":
        return sum_TN + plain_linear(x_TC, weight_NC)
    result: Tensor = _AddLinear.apply(sum_TN, x_TC, weight_NC)  # type: ignore[no-untyped-call]
    return result
