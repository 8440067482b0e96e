"""The kernels from the residual stream to attention's q, k and v, called with tensors.

Shapes: T tokens, C width, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import needed_library
from hotlap.kernels.cpu.operands import EPSILON, check, dims, operand, optional, pointer, structure
from hotlap.kernels.cpu.shares import chunk_tokens

# Of a thread's chunk. 128 and 512 take as long, at widths of 128 and 256.
MOST_CHUNK_TOKENS = 256


class Given(NamedTuple):
    """The operands: fields of `hotlap_qkv_t`."""

    x: Tensor  # (T, C)
    x0: Tensor  # (T, C), the embedding
    skip: Tensor  # (T, C), or empty
    residual_mix: Tensor  # (2,), with a skip (3,): weights of x, x0 and skip
    q: Tensor  # weights: (H·D, C)
    k: Tensor  # (G·D, C)
    v: Tensor  # (G·D, C)
    cos: Tensor  # (T, 1, D/2)
    sin: Tensor  # (T, 1, D/2)
    value_mix: Tensor  # (2,): weights of v and value_embedding
    value_embedding: Tensor  # (T, G, D), value embeddings; or empty


class Made(NamedTuple):
    """The results: fields of `hotlap_qkv_outputs_t`.

    The backward reads neither `mixed` nor v: it also takes empty tensors for them.
    """

    mixed: Tensor  # (T, C)
    inverse_rms: Tensor  # (T,): 1 / RMS of mixed
    q: Tensor  # (H, T, D)
    k: Tensor  # (G, T, D)
    v: Tensor  # (G, T, D)
    q_inverse_rms: Tensor  # (H, T): 1 / RMS of the queries before their norm
    k_inverse_rms: Tensor  # (G, T)


class Received(NamedTuple):
    """The gradients of the loss with respect to the results."""

    mixed: Tensor  # (T, C)
    q: Tensor  # (T, H, D)
    k: Tensor  # (T, G, D)
    v: Tensor  # (T, G, D)


def _checked(given: Given) -> tuple[Given, Any]:
    """The operands, contiguous, and the structure for C that points to them."""
    num_tokens, width = dims("x", given.x, 2)
    head_dim = 2 * dims("cos", given.cos, 3)[2]
    q_rows, k_rows = dims("q", given.q, 2)[0], dims("k", given.k, 2)[0]
    if not head_dim or q_rows % head_dim or k_rows % head_dim:
        raise ValueError(f"q, k: expected whole heads of {head_dim} rows, found {q_rows} and {k_rows}")
    heads, kv_heads = q_rows // head_dim, k_rows // head_dim
    stream, angles = (num_tokens, width), (num_tokens, 1, head_dim // 2)
    num_streams = 3 if given.skip.numel() else 2
    given = Given(
        x=operand("x", given.x, stream),
        x0=operand("x0", given.x0, stream),
        skip=optional("skip", given.skip, stream),
        residual_mix=operand("residual_mix", given.residual_mix, (num_streams,)),
        q=operand("q", given.q, (q_rows, width)),
        k=operand("k", given.k, (k_rows, width)),
        v=operand("v", given.v, (k_rows, width)),
        cos=operand("cos", given.cos, angles),
        sin=operand("sin", given.sin, angles),
        value_mix=operand("value_mix", given.value_mix, (2,)),
        value_embedding=optional("value_embedding", given.value_embedding, (num_tokens, kv_heads, head_dim)),
    )
    sizes = {"T": num_tokens, "C": width, "H": heads, "G": kv_heads, "D": head_dim}
    sizes["chunk_tokens"] = chunk_tokens(num_tokens, MOST_CHUNK_TOKENS)
    return given, structure("hotlap_qkv_t *", given._asdict(), **sizes, epsilon=EPSILON)


def _by_head(name: str, x_THD: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(H, T, D), contiguous: no copy of what attention's kernels return, which has this layout."""
    check(name, x_THD, shape)
    return x_THD.transpose(0, 1).contiguous()


def forward(given: Given) -> Made:
    kernels, threads = needed_library(), torch.get_num_threads()
    given, inputs = _checked(given)
    queries, keys = (inputs.H, inputs.T, inputs.D), (inputs.G, inputs.T, inputs.D)
    shapes = (given.x.shape, (inputs.T,), queries, keys, keys, queries[:2], keys[:2])
    made = Made(*(given.x.new_empty(*shape) for shape in shapes))
    workspace = given.x.new_empty(kernels.hotlap_qkv_forward_floats(inputs, threads))
    outputs = structure("hotlap_qkv_outputs_t *", made._asdict())
    kernels.hotlap_qkv_forward(inputs, outputs, pointer(workspace), threads)
    return made


def backward(given: Given, made: Made, received: Received) -> Given:
    """The gradients with respect to what was given; empty ones for the angles."""
    kernels, threads = needed_library(), torch.get_num_threads()
    given, inputs = _checked(given)
    T, C, H, G, D = inputs.T, inputs.C, inputs.H, inputs.G, inputs.D
    made = Made(
        mixed=optional("mixed", made.mixed, (T, C)),
        inverse_rms=operand("inverse_rms", made.inverse_rms, (T,)),
        q=operand("made q", made.q, (H, T, D)),
        k=operand("made k", made.k, (G, T, D)),
        v=optional("made v", made.v, (G, T, D)),
        q_inverse_rms=operand("q_inverse_rms", made.q_inverse_rms, (H, T)),
        k_inverse_rms=operand("k_inverse_rms", made.k_inverse_rms, (G, T)),
    )
    incoming = Received(
        mixed=operand("grad mixed", received.mixed, (T, C)),
        q=_by_head("grad q", received.q, (T, H, D)),
        k=_by_head("grad k", received.k, (T, G, D)),
        v=_by_head("grad v", received.v, (T, G, D)),
    )
    new_empty = given.x.new_empty
    rows = [len(weight) for weight in (given.q, given.k, given.v)]
    grads = {
        "x": torch.empty_like(given.x),
        "x0": torch.empty_like(given.x0),
        "skip": torch.empty_like(given.skip),
        "residual_mix": new_empty(T, len(given.residual_mix)),
        "weights": new_empty(threads, sum(rows), C),
        "value_embedding": torch.empty_like(given.value_embedding),
        "value_mix": new_empty(T),
    }
    gradients = structure("hotlap_qkv_gradients_t *", incoming._asdict() | grads)
    outputs = structure("hotlap_qkv_outputs_t *", made._asdict())
    workspace = new_empty(kernels.hotlap_qkv_backward_floats(inputs, threads))
    kernels.hotlap_qkv_backward(inputs, outputs, gradients, pointer(workspace), threads)
    q, k, v = grads["weights"][0].split(rows)
    # C leaves the gradient of v's weight for value_mix[0] = 1. Its dot product with the weight is
    # the gradient with respect to value_mix[0]: the sum over all tokens of gradient · value.
    value_mix = torch.stack(((v * given.v).sum(), grads["value_mix"].sum()))
    none = new_empty(0)
    return Given(
        x=grads["x"],
        x0=grads["x0"],
        skip=grads["skip"],
        residual_mix=grads["residual_mix"].sum(0),
        q=q,
        k=k,
        v=v * given.value_mix[0],
        cos=none,
        sin=none,
        value_mix=value_mix,
        value_embedding=grads["value_embedding"],
    )
