"""The pieces that both models are made of: a linear map without bias, an embedding table, a norm."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.kernels import kernels_take
from hotlap.kernels.cpu import passes
from hotlap.model.derivatives import first_derivative_only
from hotlap.model.products import linear
from hotlap.model.roles import Role


def inverse_rms(x: Tensor) -> Tensor:
    """1 / RMS over the last dimension, which is kept; float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return (norm.square() / x.size(-1) + torch.finfo(wide).eps).rsqrt()


def norm_gradient(grad: Tensor, normed: Tensor, inverse_rms: Tensor) -> Tensor:
    """The gradient for x, given that for normed = x · inverse_rms: what is along `normed` goes."""
    along = (grad * normed).sum(dim=-1, keepdim=True, dtype=inverse_rms.dtype) / normed.size(-1)
    return torch.addcmul(grad, normed, along, value=-1).mul(inverse_rms).to(grad.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if kernels_take(x):
            normed, scale = passes.norm(x)
        else:
            scale = inverse_rms(x)
            normed = (x * scale).to(x.dtype)
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gradient = passes.norm_backward if kernels_take(grad) else norm_gradient
        return gradient(grad, *ctx.saved_tensors)


def plain_rms_norm(x: Tensor) -> Tensor:
    """The reference: RMS norm over the last dimension, without weights."""
    return F.rms_norm(x, (x.size(-1),))


def rms_norm(x: Tensor) -> Tensor:
    """As the plain version, in a quarter of its time on a CPU, where that is a chain of a dozen passes."""
    if x.is_cuda or torch.compiler.is_compiling():
        return plain_rms_norm(x)
    result: Tensor = _RmsNorm.apply(x)  # type: ignore[no-untyped-call]
    return result


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, *streams: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *streams)
        return passes.mix(weights, *streams)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return passes.mix_backward(grad, *ctx.saved_tensors)


def plain_mix(weights: Tensor, *streams: Tensor) -> Tensor:
    """The reference: the sum of weights[i] · streams[i], of two or three."""
    first, *others = (weight * stream for weight, stream in zip(weights.unbind(), streams, strict=True))
    return sum(others, start=first)


def mix(weights: Tensor, *streams: Tensor) -> Tensor:
    """As the plain version, in one pass each way where there are kernels in C."""
    fit = weights.shape == (len(streams),) and len({x.shape for x in streams}) == 1 and streams[0].ndim > 0
    if torch.compiler.is_compiling() or not (fit and kernels_take(weights, *streams)):
        return plain_mix(weights, *streams)
    result: Tensor = _Mix.apply(weights, *streams)  # type: ignore[no-untyped-call]
    return result


class Matrix(nn.Module):
    """A linear map without bias: float32 weight (out, in), cast on use to the dtype of its input."""

    roles: ClassVar[dict[str, Role]] = {"weight": "matrix"}

    def __init__(self, in_features: int, out_features: int, *, zero: bool = False) -> None:
        super().__init__()
        bound = 0.0 if zero else in_features**-0.5
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Head(Matrix):
    """The output layer: a `Matrix` that another optimizer group takes."""

    roles: ClassVar[dict[str, Role]] = {"weight": "head"}


class Table(nn.Embedding):
    """An embedding table, standard normal."""

    roles: ClassVar[dict[str, Role]] = {"weight": "embedding"}
