"""Attention's kernels, called with tensors. Shapes: T tokens, H query, G key/value heads, D head dim."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from hotlap.kernels.cpu.library import needed_library, pointer


class _Attention(ctypes.Structure):
    """`attention_t` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "first_key")),
        *((name, ctypes.c_int32) for name in ("T", "H", "G", "D")),
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
        lanes = needed_library().attention_lanes()
        # Zeros change no score.
        self.features = -(-q.shape[2] // lanes) * lanes
        self.tensors = (*(_head_by_head(x, self.features) for x in (q, k, v)), first_key.contiguous())
        sizes = (len(q), q.shape[1], k.shape[1], self.features)
        self.structure = _Attention(*(x.data_ptr() for x in self.tensors), *sizes, scale)

    @property
    def address(self) -> object:
        return ctypes.byref(self.structure)

    def new_empty(self, *shape: int) -> Tensor:
        """Of the operands' float32, which is what C writes, whatever torch's default dtype is."""
        return self.tensors[0].new_empty(shape)


def _padded(x: Tensor, features: int) -> Tensor:
    return F.pad(x, (0, features - x.shape[-1])) if x.shape[-1] < features else x


def _head_by_head(x_THD: Tensor, features: int) -> Tensor:
    """(H, T, features); no copy where heads lie so in memory, as those of `kernels.inputs` do."""
    return _padded(x_THD, features).float().transpose(0, 1).contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (T, H, D), and log2 of each query's sum of exponentials, (H, T); float32."""
    kernels, threads = needed_library(), torch.get_num_threads()
    operands = _Operands(q, k, v, first_key, scale)
    num_tokens, heads, head_dim = q.shape
    out = operands.new_empty(num_tokens, heads, operands.features)
    log_sums = operands.new_empty(heads, num_tokens)
    workspace = operands.new_empty(threads, kernels.attention_forward_floats(operands.address))
    kernels.attention_forward(operands.address, *map(pointer, (out, log_sums, workspace)), threads)
    return out[..., :head_dim].contiguous(), log_sums


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
    """The gradients for q, k and v, from that for `out`; float32, head by head in memory."""
    kernels, threads = needed_library(), torch.get_num_threads()
    operands = _Operands(q, k, v, first_key, scale)
    given = (*(_padded(x, operands.features).float().contiguous() for x in (grad, out)), log_sums)
    grads = [torch.empty_like(x_HTD) for x_HTD in operands.tensors[:3]]
    gradients = _Gradients(*(x.data_ptr() for x in (*given, *grads)))
    workspace = operands.new_empty(threads, kernels.attention_backward_floats(operands.address))
    kernels.attention_backward(operands.address, ctypes.byref(gradients), pointer(workspace), threads)
    grad_q, grad_k, grad_v = (x_HTD[..., : q.shape[2]].contiguous().transpose(0, 1) for x_HTD in grads)
    return grad_q, grad_k, grad_v
