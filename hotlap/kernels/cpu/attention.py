"""Attention's kernels, called with tensors.

Shapes: T tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hotlap.kernels.cpu.library import needed_library
from hotlap.kernels.cpu.operands import check, dims, operand, pointer, structure

# What fits float32, in which the kernels compute.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Operands:
    """One call's operands as C takes them; keeps their memory alive."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float) -> None:
        kernels = needed_library()
        num_tokens, heads, head_dim = dims("q", q, 3)
        kv_heads = dims("k", k, 3)[1]
        for name, x, count in (("q", q, heads), ("k", k, kv_heads), ("v", v, kv_heads)):
            _check_float(name, x, (num_tokens, count, head_dim))
        if heads % kv_heads:
            raise ValueError(f"k: expected a number of heads that divides the {heads} of q, found {kv_heads}")
        lanes = kernels.hotlap_vector_lanes()
        # Padded with zeros, which change no score.
        self.features = -(-head_dim // lanes) * lanes
        self.q, self.k, self.v = (_head_by_head(x, self.features) for x in (q, k, v))
        self.first_key = operand("first_key", first_key, (num_tokens,), torch.int32)
        if not kernels.hotlap_attention_mask_is_valid(pointer(self.first_key), num_tokens):
            raise ValueError("first_key: expected 0 <= first_key[t] <= t that never decreases")
        tensors = {"q": self.q, "k": self.k, "v": self.v, "first_key": self.first_key}
        sizes = {"T": num_tokens, "H": heads, "G": kv_heads, "D": self.features}
        self.structure = structure("hotlap_attention_t *", tensors, **sizes, scale=scale)


def _check_float(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected float32 or a narrower float, found {x.dtype}")
    check(name, x, shape, x.dtype)


def _padded(x: Tensor, features: int) -> Tensor:
    return F.pad(x, (0, features - x.shape[-1])) if x.shape[-1] < features else x.resolve_neg()


def _head_by_head(x_THD: Tensor, features: int) -> Tensor:
    """(H, T, features), contiguous: no copy of what `qkv.forward` returned."""
    return _padded(x_THD, features).float().transpose(0, 1).contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output (T, H, D), and log2 of each query's sum of exponentials, (H, T); float32."""
    kernels, threads = needed_library(), torch.get_num_threads()
    operands = _Operands(q, k, v, first_key, scale)
    num_tokens, heads, head_dim = q.shape
    # Of float32, which is what C writes, whatever torch's default dtype is.
    new_empty = operands.q.new_empty
    out, log_sums = new_empty(num_tokens, heads, operands.features), new_empty(heads, num_tokens)
    workspace = new_empty(kernels.hotlap_attention_forward_floats(operands.structure, threads))
    kernels.hotlap_attention_forward(
        operands.structure, pointer(out), pointer(log_sums), pointer(workspace), threads
    )
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
    """Gradients of q, k and v from `grad`, that of `out`; float32, in memory (heads, T, D)."""
    kernels, threads = needed_library(), torch.get_num_threads()
    operands = _Operands(q, k, v, first_key, scale)
    num_tokens, heads, head_dim = q.shape
    for name, x in (("grad", grad), ("out", out)):
        _check_float(name, x, q.shape)
    grad_out, out = (_padded(x, operands.features).float().contiguous() for x in (grad, out))
    log_sums = operand("log_sums", log_sums, (heads, num_tokens))
    grads = [torch.empty_like(x_HTD) for x_HTD in (operands.q, operands.k, operands.v)]
    tensors = {"grad_out": grad_out, "out": out, "log_sums": log_sums}
    tensors |= dict(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True))
    gradients = structure("hotlap_attention_gradients_t *", tensors)
    workspace = operands.q.new_empty(kernels.hotlap_attention_backward_floats(operands.structure, threads))
    kernels.hotlap_attention_backward(operands.structure, gradients, pointer(workspace), threads)
    grad_q, grad_k, grad_v = (x_HTD[..., :head_dim].contiguous().transpose(0, 1) for x_HTD in grads)
    return grad_q, grad_k, grad_v
