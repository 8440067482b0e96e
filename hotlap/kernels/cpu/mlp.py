"""The MLP's kernels, called with tensors.

Shapes: T tokens, C width, A features of attention's output, F hidden features.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import kernels_take, needed_library, pointer
from hotlap.kernels.cpu.passes import EPSILON
from hotlap.kernels.cpu.shares import chunk_tokens, pays_to_share

# Every chunk of a thread goes through both weights and their gradients, which fit a cache or are worth it to
# a long chunk. Up to a width of 768 that takes 0.96 to 0.98 of PyTorch's time; more was not tried.
MOST_WEIGHTS = 3 * 2**20
# Of a thread's chunk, so that they stay in its core's cache between the passes.
CHUNK_FEATURES = 2**17
# Products of fewer are slower than a cache makes up for: 2.5 % of the MLP at width 256.
LEAST_CHUNK_TOKENS = 256


class Given(NamedTuple):
    """The stream, attention's output and its projection (both empty without attention), and the weights."""

    x: Tensor  # (T, C)
    attended: Tensor  # (T, A)
    project: Tensor  # (C, A)
    expand: Tensor  # (F, C)
    out: Tensor  # (C, F)


class Made(NamedTuple):
    """The result, and for the backward: x with attention's output added, 1 / RMS of that, and relu(h)."""

    y: Tensor  # (T, C)
    sum: Tensor  # (T, C); empty without attention, where it would be x
    inverse_rms: Tensor  # (T,)
    hidden: Tensor  # (T, F)


class _Mlp(ctypes.Structure):
    """`mlp_t` of mlp.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in Given._fields),
        *((name, ctypes.c_int32) for name in ("T", "C", "A", "F", "chunk_tokens")),
        ("epsilon", ctypes.c_float),
    )


class _Gradients(ctypes.Structure):
    """`mlp_gradients_t` of mlp.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("y", *Given._fields, "shares"))


def suits(x_TC: Tensor, expand_FC: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take such operands and are the faster way."""
    fits = len(x_TC) > 0 and expand_FC.numel() <= MOST_WEIGHTS and pays_to_share(x_TC, expand_FC)
    return fits and kernels_take(x_TC, expand_FC, *others)


def _structure(given: Given) -> _Mlp:
    (num_tokens, width), num_features, attended = given.x.shape, len(given.expand), given.attended.shape[-1]
    shapes = tuple(x.shape for x in given[1:])
    with_attention = ((num_tokens, attended), (width, attended)) if given.attended.numel() else shapes[:2]
    expected = (*with_attention, (num_features, width), (width, num_features))
    assert shapes == expected, f"operands of {shapes} for {num_tokens} tokens and width {width}"
    # A wide weight's way through the caches is worth it to a long chunk. Powers of 2: at a width of 768, 683
    # tokens at a time take 1.04 times as long as 1,024.
    of_width = 2 ** (width - 1).bit_length()
    most = max(LEAST_CHUNK_TOKENS, of_width, CHUNK_FEATURES // num_features)
    sizes = (num_tokens, width, attended, num_features, chunk_tokens(num_tokens, most))
    return _Mlp(*map(pointer, given), *sizes, EPSILON)


def forward(given: Given) -> Made:
    """What is made of s = x + attended · projectᵀ: s + relu(norm(s) · expandᵀ)² · outᵀ, and the rest."""
    kernels, threads = needed_library(), torch.get_num_threads()
    given = Given(*(x.contiguous() for x in given))
    mlp, new_empty = _structure(given), given.x.new_empty
    has_attention = given.attended.numel() > 0
    made = Made(
        y=new_empty(given.x.shape),
        sum=new_empty(given.x.shape if has_attention else 0),
        inverse_rms=new_empty(mlp.T),
        hidden=new_empty(mlp.T, mlp.F),
    )
    workspace = new_empty(kernels.mlp_forward_floats(ctypes.byref(mlp), threads))
    results = map(pointer, (made.sum, made.y, made.inverse_rms, made.hidden, workspace))
    kernels.mlp_forward(ctypes.byref(mlp), *results, threads)
    return made


def backward(grad_TC: Tensor, given: Given, inverse_rms_T: Tensor, hidden_TF: Tensor) -> Given:
    """The gradients for what was given. given.x: the sum that the forward made, if it made one."""
    kernels, threads = needed_library(), torch.get_num_threads()
    given = Given(*(x.contiguous() for x in given))
    mlp, grad_y = _structure(given), grad_TC.contiguous()
    gradients = Given(*(x.new_empty(x.shape) for x in given))
    weights = given.expand.numel() + given.out.numel() + given.project.numel()
    shares = grad_y.new_empty(threads - 1, weights)
    structure = _Gradients(*map(pointer, (grad_y, *gradients, shares)))
    workspace = grad_y.new_empty(kernels.mlp_backward_floats(ctypes.byref(mlp), threads))
    kept = (pointer(inverse_rms_T.contiguous()), pointer(hidden_TF.contiguous()), pointer(workspace))
    kernels.mlp_backward(ctypes.byref(mlp), ctypes.byref(structure), *kept, threads)
    return gradients
