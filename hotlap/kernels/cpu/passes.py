"""Kernels of one pass over activations, called with tensors: norm with rotation, a weighted sum.

Their callers pass tensors of any shape; if a tensor has no elements, C is not called.
Shapes: T tokens, H heads, D features per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import ffi, needed_library
from hotlap.kernels.cpu.operands import dims, operand, pointer

EPSILON = torch.finfo(torch.float32).eps  # the default of rms_norm


def norm(x_THD: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x / RMS, rotated by angles (T, 1, D/2) if given, and 1 / RMS, (T, H, 1).

    Without angles x is any (…, D), and 1 / RMS is (…, 1).
    """
    sizes = _sizes(x_THD, cos)
    if x_THD.numel() == 0:
        return torch.empty_like(x_THD), x_THD.new_empty(*x_THD.shape[:-1], 1)
    x, angles = operand("x", x_THD, x_THD.shape), _angles(x_THD, cos, sin)
    out, inverse_rms = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
    needed_library().hotlap_norm_forward(
        *(pointer(x), *_pointers(angles), *sizes, EPSILON),
        *(pointer(out), pointer(inverse_rms), torch.get_num_threads()),
    )
    return out, inverse_rms


def norm_backward(
    grad: Tensor, out: Tensor, inverse_rms: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
) -> Tensor:
    """The gradient with respect to x, from `grad` with respect to `out`."""
    sizes = _sizes(out, cos)
    if out.numel() == 0:
        return torch.empty_like(out)
    grad, out = operand("grad", grad, out.shape), operand("out", out, out.shape)
    inverse_rms = operand("inverse_rms", inverse_rms, (*out.shape[:-1], 1))
    angles, grad_x = _angles(out, cos, sin), torch.empty_like(out)
    needed_library().hotlap_norm_backward(
        *(pointer(grad), pointer(out), pointer(inverse_rms), *_pointers(angles), *sizes),
        *(pointer(grad_x), torch.get_num_threads()),
    )
    return grad_x


def mix(weights: Tensor, *streams: Tensor) -> Tensor:
    """The sum of weights[i] · streams[i], of two or three streams."""
    shape, count = _mixed_shape(streams), len(streams)
    if 0 in shape:
        return streams[0].new_empty(shape)
    weights, *streams_together = _mixed_operands(weights, streams)
    out = torch.empty_like(streams_together[0])
    needed_library().hotlap_mix_forward(
        *(pointer(weights), [pointer(x) for x in streams_together], count),
        *(out.numel(), pointer(out), torch.get_num_threads()),
    )
    return out


def mix_backward(grad: Tensor, weights: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
    """The gradients with respect to the weights and the streams."""
    shape, count = _mixed_shape(streams), len(streams)
    if 0 in shape:
        return torch.zeros_like(weights), *map(torch.empty_like, streams)
    grad = operand("grad", grad, shape)
    weights, *streams_together = _mixed_operands(weights, streams)
    gradients = [torch.empty_like(x) for x in streams_together]
    by_row = grad.new_empty(len(grad), count)
    needed_library().hotlap_mix_backward(
        *(pointer(grad), pointer(weights), [pointer(x) for x in streams_together], count),
        *(len(grad), grad.numel() // len(grad), [pointer(x) for x in gradients]),
        *(pointer(by_row), torch.get_num_threads()),
    )
    return by_row.sum(0), *gradients


def _mixed_shape(streams: tuple[Tensor, ...]) -> torch.Size:
    if len(streams) not in (2, 3):
        raise ValueError(f"streams: expected 2 or 3, found {len(streams)}")
    if streams[0].ndim == 0:
        raise ValueError("streams: expected at least one dimension, found single numbers")
    return streams[0].shape


def _mixed_operands(weights: Tensor, streams: tuple[Tensor, ...]) -> list[Tensor]:
    shape = streams[0].shape
    together = [operand("streams", x, shape) for x in streams]
    return [operand("weights", weights, (len(streams),)), *together]


def _sizes(x: Tensor, cos: Tensor | None) -> tuple[int, int, int]:
    """Rows of angles, heads per row, features. Without angles every head is a row of its own."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: expected at least one feature in its last dimension, found {tuple(x.shape)}")
    if cos is None:
        return x.numel() // x.shape[-1], 1, x.shape[-1]
    num_tokens, heads, features = dims("x", x, 3)
    if features % 2:
        raise ValueError(f"x: expected an even number of features to rotate, found {features}")
    return num_tokens, heads, features


def _angles(x_THD: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, ...]:
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("cos, sin: expected both or neither")
        return ()
    shape = (len(x_THD), 1, x_THD.shape[2] // 2)
    return operand("cos", cos, shape), operand("sin", sin, shape)


def _pointers(angles: tuple[Tensor, ...]) -> tuple[Any, Any]:
    return (pointer(angles[0]), pointer(angles[1])) if angles else (ffi.NULL, ffi.NULL)
