"""Rotary positions: pairs of features of q and k are turned by an angle that grows with the position.

Feature i is paired with feature i + D/2. `full` turns every pair, with wavelengths from 1 to the base;
`half` turns only the first half of the pairs and leaves the others as they are.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hotlap.kernels import kernels_take
from hotlap.kernels.cpu import passes
from hotlap.model.derivatives import first_derivative_only
from hotlap.model.layers import inverse_rms, norm_gradient, plain_rms_norm


class Rotation(NamedTuple):
    """cos and sin of the angles at some positions, each (T, 1, D/2): the same for every head."""

    cos: Tensor
    sin: Tensor


def angular_frequencies(head_dim: int, kind: Literal["full", "half"], base: float) -> Tensor:
    """Radians per token of each of the D/2 pairs, float32."""
    pairs = head_dim // 2
    if kind == "full":
        return base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    turning = base ** -torch.linspace(0, 1, steps=pairs // 2, dtype=torch.float32)
    return torch.cat([turning, turning.new_zeros(pairs - pairs // 2)])


def plain_norm_and_rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """The reference: RMS norm of each head, then the rotation."""
    first, second = plain_rms_norm(x_THD).chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def _turn(x_THD: Tensor, cos: Tensor, sin: Tensor, direction: Literal[1, -1]) -> Tensor:
    out = torch.empty_like(x_THD)
    first, second = x_THD.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=direction)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=-direction)
    return out


def _kernels_turn(x_THD: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether there are kernels, for these operands; they take a row of angles for each token."""
    fits = x_THD.ndim == 3 and cos.shape == sin.shape == (len(x_THD), 1, x_THD.shape[2] / 2)
    return fits and kernels_take(x_THD, cos, sin)


class _NormAndRotate(torch.autograd.Function):
    """Keeps nothing but its own output, which attention keeps anyway.

    A rotation changes no dot product, so the norm's gradient can be taken before turning back.
    """

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if _kernels_turn(x_THD, cos, sin):
            out, scale = passes.norm(x_THD, cos, sin)
        else:
            scale = inverse_rms(x_THD)
            out = _turn((x_THD * scale).to(x_THD.dtype), cos, sin, 1)
        ctx.save_for_backward(out, scale, cos, sin)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor, None, None]:
        out, scale, cos, sin = ctx.saved_tensors
        if _kernels_turn(grad_THD, cos, sin):
            return passes.norm_backward(grad_THD, out, scale, cos, sin), None, None
        return _turn(norm_gradient(grad_THD, out, scale), cos, sin, -1), None, None


def norm_and_rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """As the plain version, in a third of its passes and memory on a CPU."""
    if x_THD.is_cuda or torch.compiler.is_compiling():
        return plain_norm_and_rotate(x_THD, rotation)
    result: Tensor = _NormAndRotate.apply(x_THD, *rotation)  # type: ignore[no-untyped-call]
    return result


class Rotary(nn.Module):
    """Angles precomputed for packed sequences of up to a length; not part of a checkpoint."""

    frequencies: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, kind: Literal["full", "half"], base: float, max_tokens: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", angular_frequencies(head_dim, kind, base), persistent=False)
        table = self.at(torch.arange(max_tokens), torch.float32)
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)

    def forward(self, count: int, dtype: torch.dtype) -> Rotation:
        """Positions 0 … count − 1."""
        assert count <= self.cos.size(0), f"{count} positions, {self.cos.size(0)} of them precomputed"
        return Rotation(self.cos[:count].to(dtype), self.sin[:count].to(dtype))

    def at(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """Any positions, in any order and however far; what the table holds for those that it has."""
        angles = torch.outer(positions_T.float(), self.frequencies)[:, None, :]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
