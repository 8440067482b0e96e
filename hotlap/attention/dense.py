"""Reference attention: a T×T mask, a matmul, a softmax, a matmul.

Tests compare every other backend with this one. It takes O(T²) time and memory for any mask, so it
is for tests and small comparisons only.

Shapes: T tokens, H query heads, G key/value heads (H is a multiple of G), D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotlap.attention.mask import Mask


def visible_pairs(mask: Mask) -> Tensor:
    """(T, T) bool, rows are queries: the definition of `Mask`."""
    positions = torch.arange(len(mask.documents), device=mask.documents.device)
    query, key = positions[:, None], positions[None, :]
    causal = key <= query
    same_document = mask.documents[:, None] == mask.documents[None, :]
    blocks_apart = query // mask.block_size - key // mask.block_size
    if mask.unit == "tokens":
        in_window = query - key < mask.window
    elif mask.unit == "blocks":
        in_window = blocks_apart < mask.window
    else:
        in_window = (query - key < mask.window) & (blocks_apart < (mask.window / mask.block_size).ceil())
    return causal & same_document & in_window


@dataclass(frozen=True)
class DenseBackend:
    """The reference as a backend."""

    name: str = "dense"
    plans_on_device: bool = True

    def plan(self, mask: Mask) -> Tensor:
        return visible_pairs(mask)

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: Tensor, scale: float) -> Tensor:
        heads_per_kv = q_THD.shape[1] // k_TGD.shape[1]
        k_THD = k_TGD.repeat_interleave(heads_per_kv, dim=1)
        v_THD = v_TGD.repeat_interleave(heads_per_kv, dim=1)
        scores_HTT = torch.einsum("qhd,khd->hqk", q_THD, k_THD).mul(scale).to(_softmax_dtype(q_THD))
        weights_HTT = scores_HTT.masked_fill(~plan, float("-inf")).softmax(dim=-1).to(v_THD.dtype)
        return torch.einsum("hqk,khd->qhd", weights_HTT, v_THD)


def _softmax_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
