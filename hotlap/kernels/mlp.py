"""The MLP's kernels, called with tensors. Shapes: T tokens, C width, F hidden features."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hotlap.kernels.compiled import kernels_take, needed_library, pointer
from hotlap.kernels.passes import EPSILON
from hotlap.kernels.shares import pays_to_share

# Every chunk of a thread goes through both weights and their gradients, which fit a cache or are worth it to
# a long chunk. Up to a width of 768 that takes 0.96 to 0.98 of PyTorch's time; more was not tried.
MOST_WEIGHTS = 3 * 2**20
# Of a thread's chunk, so that they stay in its core's cache between the passes.
CHUNK_FEATURES = 2**17
# Products of fewer are slower than a cache makes up for: 2.5 % of the MLP at width 256.
LEAST_CHUNK_TOKENS = 256


def suits(x_TC: Tensor, expand_FC: Tensor, out_CF: Tensor) -> bool:
    """Whether the kernels take such operands and are the faster way."""
    fits = expand_FC.numel() <= MOST_WEIGHTS and pays_to_share(x_TC, expand_FC)
    return fits and kernels_take(x_TC, expand_FC, out_CF)


def _chunk_tokens(num_tokens: int, width: int, num_features: int, threads: int) -> int:
    share = -(-num_tokens // threads)
    most = max(LEAST_CHUNK_TOKENS, width, CHUNK_FEATURES // num_features)
    chunks = max(1, -(-share // most))
    # All of them equal but for the last one's end: a chunk of a few tokens costs a pass over all weights.
    return max(1, -(-share // chunks))


def forward(x_TC: Tensor, expand_FC: Tensor, out_CF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x + relu(norm(x) · expandᵀ)² · outᵀ, 1 / RMS of x, (T,), and relu(norm(x) · expandᵀ), (T, F)."""
    kernels, threads = needed_library(), torch.get_num_threads()
    (num_tokens, width), num_features = x_TC.shape, len(expand_FC)
    shapes = (expand_FC.shape, out_CF.shape)
    assert shapes == ((num_features, width), (width, num_features)), f"weights {shapes} for width {width}"
    chunk_tokens = _chunk_tokens(num_tokens, width, num_features, threads)
    operands = [x.contiguous() for x in (x_TC, expand_FC, out_CF)]
    y_TC, inverse_rms_T = x_TC.new_empty(x_TC.shape), x_TC.new_empty(num_tokens)
    hidden_TF = x_TC.new_empty(num_tokens, num_features)
    workspace = x_TC.new_empty(kernels.mlp_forward_floats(chunk_tokens, width, num_features, threads))
    kernels.mlp_forward(
        *map(pointer, operands),
        *(num_tokens, width, num_features, chunk_tokens, ctypes.c_float(EPSILON)),
        *map(pointer, (y_TC, inverse_rms_T, hidden_TF, workspace)),
        threads,
    )
    return y_TC, inverse_rms_T, hidden_TF


def backward(
    grad_TC: Tensor,
    x_TC: Tensor,
    expand_FC: Tensor,
    out_CF: Tensor,
    inverse_rms_T: Tensor,
    hidden_TF: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for x, expand and out, from that for the result."""
    kernels, threads = needed_library(), torch.get_num_threads()
    (num_tokens, width), num_features = x_TC.shape, len(expand_FC)
    chunk_tokens = _chunk_tokens(num_tokens, width, num_features, threads)
    operands = [x.contiguous() for x in (grad_TC, x_TC, expand_FC, out_CF, inverse_rms_T, hidden_TF)]
    grad_x, grad_expand, grad_out = (x.new_empty(x.shape) for x in (x_TC, expand_FC, out_CF))
    shares = x_TC.new_empty(2, threads - 1, num_features * width)
    workspace = x_TC.new_empty(kernels.mlp_backward_floats(chunk_tokens, width, num_features, threads))
    kernels.mlp_backward(
        *map(pointer, operands),
        *(num_tokens, width, num_features, chunk_tokens),
        *map(pointer, (grad_x, grad_expand, grad_out, shares, workspace)),
        threads,
    )
    return grad_x, grad_expand, grad_out
