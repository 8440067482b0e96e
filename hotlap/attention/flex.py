"""Masked attention by FlexAttention (https://pytorch.org/blog/flexattention/), fast on CUDA.

The block lists of `mask.py` give the key blocks that each query block visits. The mask function is
evaluated only inside partial blocks. On other devices only the forward pass works, slowly, which is
enough for tests of the block lists.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hotlap.attention.mask import Mask, block_lists


def visible(mask: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a `mask_mod` of flex_attention: a function of batch, head, query and key."""

    window_blocks = mask.window_blocks if mask.limits_blocks else None

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        seen = (key <= query) & (mask.documents[query] == mask.documents[key])
        if mask.limits_tokens:
            seen = seen & (query - key < mask.window)
        if window_blocks is not None:
            seen = seen & (query // mask.block_size - key // mask.block_size < window_blocks)
        return seen

    return mask_mod


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class FlexBackend:
    name: str = "flex"
    plans_on_device: bool = True

    def plan(self, mask: Mask) -> BlockMask:
        # flex_attention expects batch and head dimensions; size 1 broadcasts over all heads.
        partial_counts, partial_indices, full_counts, full_indices = (
            x[None, None] for x in block_lists(mask)
        )
        total = len(mask.documents)
        return BlockMask.from_kv_blocks(
            partial_counts,
            partial_indices,
            full_counts,
            full_indices,
            BLOCK_SIZE=mask.block_size,
            mask_mod=visible(mask),
            seq_lengths=(total, total),
        )

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: BlockMask, scale: float) -> Tensor:
        # Uncompiled, flex_attention materializes the T×T scores. Inside a compiled block the
        # compiler fuses the call.
        alone_on_cuda = q_THD.is_cuda and not torch.compiler.is_compiling()
        attention = _compiled_flex_attention() if alone_on_cuda else flex_attention
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        grouped = q_THD.shape[1] != k_TGD.shape[1]
        out: Tensor = attention(q, k, v, block_mask=plan, scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)
