"""Attention's kernels, called with tensors. Shapes: T tokens, H query, G key/value heads, D head dim."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hotlap.kernels.compiled import needed_library, pointer

SHORT_TILE, LONG_TILE = 64, 128  # queries
MOST_TILE = 128  # that of attention.c, whose rows of a tile have their place on the stack
FAR_KEYS = 384


class _Attention(ctypes.Structure):
    """`attention_t` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "first_key")),
        *((name, ctypes.c_int32) for name in ("T", "H", "G", "D", "q_stride", "k_stride", "v_stride")),
        ("tile", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class _Gradients(ctypes.Structure):
    """`gradients_t` of attention.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("grad", "out", "log_sums", "grad_q", "grad_k", "grad_v")
    )


class _Operands:
    """One call's operands as the kernels take them, and kept alive as long as this is."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float) -> None:
        self.tensors = (*(_with_heads_together(x) for x in (q, k, v)), first_key.contiguous())
        strides = [x.stride(0) for x in self.tensors[:3]]
        sizes = (len(q), q.shape[1], k.shape[1], q.shape[2])
        tile = _tile_queries(first_key)
        assert 1 <= tile <= MOST_TILE, f"a tile of {tile} queries, at most {MOST_TILE} fit"
        self.structure = _Attention(*(x.data_ptr() for x in self.tensors), *sizes, *strides, tile, scale)

    @property
    def address(self) -> object:
        return ctypes.byref(self.structure)

    def new_empty(self, *shape: int) -> Tensor:
        """Of the operands' float32, which is what C writes, whatever torch's default dtype is."""
        return self.tensors[0].new_empty(shape)


def _tile_queries(first_key: Tensor) -> int:
    """More have faster products but compute more of what the mask hides: for queries that see far."""
    mean_keys = (len(first_key) + 1) / 2 - first_key.sum().item() / max(1, len(first_key))
    return LONG_TILE if mean_keys > FAR_KEYS else SHORT_TILE


def _with_heads_together(x: Tensor) -> Tensor:
    """As float32, with the features of all heads side by side, which tokens need not be."""
    x = x.float()
    apart, *within = x.stride()
    # An expanded tensor has its tokens on top of each other, which no product takes for a matrix.
    fits = within == [x.shape[2], 1] and apart >= x.shape[1] * x.shape[2]
    # Not contiguous(), which leaves the stride of a single token as it is.
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def forward(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (T, H, D), and log2 of each query's sum of exponentials, (H, T); float32."""
    kernels, threads = needed_library(), torch.get_num_threads()
    operands = _Operands(q, k, v, first_key, scale)
    out, log_sums = operands.new_empty(*q.shape), operands.new_empty(q.shape[1], len(q))
    workspace = operands.new_empty(threads, kernels.attention_forward_floats(operands.address))
    kernels.attention_forward(operands.address, *map(pointer, (out, log_sums, workspace)), threads)
    return out, log_sums


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_key: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for q, k and v, from that for `out`; float32."""
    kernels, threads = needed_library(), torch.get_num_threads()
    operands = _Operands(q, k, v, first_key, scale)
    given = (grad.float().contiguous(), out.float().contiguous(), log_sums)
    grad_q, grad_k, grad_v = (operands.new_empty(*x.shape) for x in (q, k, v))
    gradients = _Gradients(*(x.data_ptr() for x in (*given, grad_q, grad_k, grad_v)))
    workspace = operands.new_empty(threads, kernels.attention_backward_floats(operands.address))
    kernels.attention_backward(operands.address, ctypes.byref(gradients), pointer(workspace), threads)
    return grad_q, grad_k, grad_v
