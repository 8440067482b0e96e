"""Masked attention on a CPU, in float32: the kernels in C as operators with a backward.

Computes what `blocked` does, at a cost proportional to the visible block pairs. Saves one float per query and
head; the backward recomputes the probabilities, which is faster than reading them from memory.
Shapes: T tokens, H query heads, G key/value heads, D head dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotlap.attention.blocked import check_shapes
from hotlap.attention.mask import Mask, first_visible_keys
from hotlap.kernels.cpu import attention as kernels


@dataclass(frozen=True)
class NativePlan:
    """One batch's mask, shared by all layers."""

    first_key: Tensor  # (T,) int32


@dataclass(frozen=True)
class NativeBackend:
    name: str = "native"
    plans_on_device: bool = False

    def plan(self, mask: Mask) -> NativePlan:
        return NativePlan(first_visible_keys(mask))

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: NativePlan, scale: float) -> Tensor:
        check_shapes(q_THD, k_TGD, v_TGD, plan.first_key)
        assert q_THD.dtype != torch.float64, "the kernels sum in float32: take blocked for float64"
        out: Tensor = _forward(q_THD, k_TGD, v_TGD, plan.first_key, scale)[0]
        return out


@torch.library.custom_op("hotlap::native_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (T, H, D), and log2 of each query's sum of exponentials, (H, T)."""
    out, log_sums = kernels.forward(q, k, v, first_key, scale)
    return out.to(q.dtype), log_sums


@torch.library.custom_op("hotlap::native_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = kernels.backward(grad, q, k, v, first_key, out, log_sums, scale)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    del k, v, first_key, scale
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, first_key, out, log_sums, scale
    grad_q, grad_k, grad_v = (x.new_empty(x.transpose(0, 1).shape).transpose(0, 1) for x in (q, k, v))
    return grad_q, grad_k, grad_v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first_key, scale = inputs
    out, log_sums = output
    ctx.scale = scale
    ctx.save_for_backward(q, k, v, first_key, out, log_sums)
    ctx.mark_non_differentiable(log_sums)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return (*_backward(grad, *ctx.saved_tensors, ctx.scale), None, None)


_forward.register_autograd(_autograd, setup_context=_setup_context)
