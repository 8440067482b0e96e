"""Kernels that pass once over activations, called with tensors: norm with rotation, and a weighted sum.

Shapes: T tokens, H heads, D features of each.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import addresses, needed_library, pointer

EPSILON = torch.finfo(torch.float32).eps  # as rms_norm's default


def norm(x_THD: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x / RMS, turned where there are angles; and 1 / RMS, (T, H, 1). Without angles any (…, D), (…, 1)."""
    x = x_THD.contiguous()
    out, inverse_rms = x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)
    needed_library().norm_forward(
        *(pointer(x), *_angles(cos, sin), *_sizes(x), ctypes.c_float(EPSILON)),
        *(pointer(out), pointer(inverse_rms), torch.get_num_threads()),
    )
    return out, inverse_rms


def norm_backward(
    grad: Tensor, out: Tensor, inverse_rms: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
) -> Tensor:
    """The gradient for x, from that for `out`."""
    grad, grad_x = grad.contiguous(), out.new_empty(out.shape)
    needed_library().norm_backward(
        *(pointer(grad), pointer(out), pointer(inverse_rms), *_angles(cos, sin), *_sizes(out)),
        *(pointer(grad_x), torch.get_num_threads()),
    )
    return grad_x


def mix(weights: Tensor, *streams: Tensor) -> Tensor:
    """The sum of weights[i] · streams[i]."""
    weights, *streams_together = (x.contiguous() for x in (weights, *streams))
    out = weights.new_empty(streams[0].shape)
    needed_library().mix_forward(
        *(pointer(weights), addresses(streams_together), len(streams)),
        *(ctypes.c_int64(out.numel()), pointer(out), torch.get_num_threads()),
    )
    return out


def mix_backward(grad: Tensor, weights: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
    """The gradients for the weights and the streams."""
    grad, weights, *streams_together = (x.contiguous() for x in (grad, weights, *streams))
    gradients = [x.new_empty(x.shape) for x in streams]
    by_row = grad.new_empty(len(grad), len(streams))
    needed_library().mix_backward(
        *(pointer(grad), pointer(weights), addresses(streams_together), len(streams)),
        *(len(grad), grad[:1].numel(), addresses(gradients), pointer(by_row), torch.get_num_threads()),
    )
    return by_row.sum(0), *gradients


def _angles(cos: Tensor | None, sin: Tensor | None) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    if cos is None or sin is None:
        return ctypes.c_void_p(), ctypes.c_void_p()
    assert all(angles.is_contiguous() for angles in (cos, sin)), "angles come as rows of a table"
    return pointer(cos), pointer(sin)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Tokens, heads that share a token's angles, features. Whatever leads the features is a token."""
    heads, features = x.shape[1] if x.ndim == 3 else 1, x.shape[-1]
    return x.numel() // max(1, heads * features), heads, features
