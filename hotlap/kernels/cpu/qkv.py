"""The kernels from the residual stream to attention's operands, called with tensors.

Shapes: T tokens, C width, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import kernels_take, needed_library, pointer
from hotlap.kernels.cpu.passes import EPSILON
from hotlap.kernels.cpu.shares import chunk_tokens, pays_to_share

# Of a thread's chunk. 128 and 512 take as long, at widths of 128 and 256.
MOST_CHUNK_TOKENS = 256


class Given(NamedTuple):
    """What the operands are made from."""

    x: Tensor  # (T, C)
    x0: Tensor  # (T, C)
    skip: Tensor  # (T, C), or empty
    stream_mix: Tensor  # (2,); with a skip (3,)
    q: Tensor  # weights: (H·D, C)
    k: Tensor  # (G·D, C)
    v: Tensor  # (G·D, C)
    cos: Tensor  # (T, 1, D/2)
    sin: Tensor  # (T, 1, D/2)
    value_mix: Tensor  # (2,)
    mixed_in: Tensor  # (T, G, D), or empty


class Made(NamedTuple):
    """The mixed stream, attention's operands, and 1 / RMS of stream, queries and keys for the backward.

    Which takes empty ones for `mixed` and v: it needs neither.
    """

    mixed: Tensor  # (T, C)
    inverse_rms: Tensor  # (T,)
    q: Tensor  # (H, T, D)
    k: Tensor  # (G, T, D)
    v: Tensor  # (G, T, D)
    q_inverse_rms: Tensor  # (H, T)
    k_inverse_rms: Tensor  # (G, T)


class Received(NamedTuple):
    """The gradients that come back."""

    mixed: Tensor  # (T, C)
    q: Tensor  # (T, H, D)
    k: Tensor  # (T, G, D)
    v: Tensor  # (T, G, D)
    later_x0: Tensor  # (T, C), for x0 as it goes on to later layers; or empty


class _Inputs(ctypes.Structure):
    """`inputs_t` of inputs.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in Given._fields),
        *((name, ctypes.c_int32) for name in ("T", "C", "H", "G", "D", "chunk_tokens")),
        ("epsilon", ctypes.c_float),
    )


class _Operands(ctypes.Structure):
    """`operands_t` of inputs.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in Made._fields)


class _Gradients(ctypes.Structure):
    """`input_gradients_t` of inputs.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (*Received._fields, "x", "x0", "skip", "stream_mix", "weights", "mixed_in", "value_mix")
    )


def suits_model(x: Tensor, q: Tensor) -> bool:
    """As `suits`, by what tells most: the stream and a weight."""
    return pays_to_share(x, q) and kernels_take(x, q)


def suits(given: Given) -> bool:
    """Whether the kernels take such operands and are the faster way."""
    angles_fit = given.cos.shape == given.sin.shape == (len(given.x), 1, given.cos.shape[2])
    return angles_fit and suits_model(given.x, given.q) and kernels_take(*given)


def _structure(given: Given) -> _Inputs:
    (num_tokens, width), head_dim = given.x.shape, 2 * given.cos.shape[2]
    assert given.q.shape[1] == given.k.shape[1] == width, f"weights {given.q.shape}, {given.k.shape}"
    assert given.k.shape == given.v.shape, f"keys by {given.k.shape}, values by {given.v.shape}"
    assert given.skip.numel() in (0, given.x.numel()), f"a skip of {given.skip.shape}"
    streams = 3 if given.skip.numel() else 2
    assert given.stream_mix.shape == (streams,), f"{given.stream_mix.shape} weights for {streams} streams"
    features = given.mixed_in.numel()
    assert features in (0, num_tokens * len(given.v)), f"{given.mixed_in.shape} is mixed in"
    sizes = (num_tokens, width, len(given.q) // head_dim, len(given.k) // head_dim, head_dim)
    return _Inputs(*map(pointer, given), *sizes, chunk_tokens(num_tokens, MOST_CHUNK_TOKENS), EPSILON)


def forward(given: Given) -> Made:
    kernels, threads = needed_library(), torch.get_num_threads()
    given = Given(*(x.contiguous() for x in given))
    inputs = _structure(given)
    queries, keys = (inputs.H, inputs.T, inputs.D), (inputs.G, inputs.T, inputs.D)
    shapes = (given.x.shape, (inputs.T,), queries, keys, keys, queries[:2], keys[:2])
    made = Made(*(given.x.new_empty(shape) for shape in shapes))
    workspace = given.x.new_empty(kernels.inputs_forward_floats(ctypes.byref(inputs), threads))
    operands = _Operands(*map(pointer, made))
    kernels.inputs_forward(ctypes.byref(inputs), ctypes.byref(operands), pointer(workspace), threads)
    return made


def backward(given: Given, made: Made, received: Received) -> Given:
    """The gradients for what was given; empty ones for the angles."""
    kernels, threads = needed_library(), torch.get_num_threads()
    given = Given(*(x.contiguous() for x in given))
    inputs = _structure(given)
    # Head by head, as attention's kernels leave them.
    by_head = [x_THD.transpose(0, 1).contiguous() for x_THD in (received.q, received.k, received.v)]
    new_empty = given.x.new_empty
    x, x0, skip = (new_empty(stream.shape) for stream in (given.x, given.x0, given.skip))
    stream_mix = new_empty(inputs.T, len(given.stream_mix))
    rows = [len(weight) for weight in (given.q, given.k, given.v)]
    weights = new_empty(threads, sum(rows), inputs.C)
    mixed_in, of_mixed_in = torch.empty_like(given.mixed_in), new_empty(inputs.T)
    came = (received.mixed.contiguous(), *by_head, received.later_x0.contiguous())
    new = (x, x0, skip, stream_mix, weights, mixed_in, of_mixed_in)
    gradients = _Gradients(*map(pointer, (*came, *new)))
    workspace = new_empty(kernels.inputs_backward_floats(ctypes.byref(inputs), threads))
    structures = (inputs, _Operands(*map(pointer, made)), gradients)
    kernels.inputs_backward(*map(ctypes.byref, structures), pointer(workspace), threads)
    q, k, v = weights[0].split(rows)
    # The sum of gradient · value over all tokens, which is that of the weight's gradient · weight.
    value_mix = torch.stack(((v * given.v).sum(), of_mixed_in.sum()))
    none = new_empty(0)
    of_v = v * given.value_mix[0]
    return Given(x, x0, skip, stream_mix.sum(0), q, k, of_v, none, none, value_mix, mixed_in)
