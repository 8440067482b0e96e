"""Which keys a query may see, as data: a document id per token and a window, in tokens or in blocks.

Every attention backend takes the same `Mask`. Nothing here builds a T×T object or waits for the device, and
the window is a tensor, so a run that widens it recompiles nothing.

Shapes: T tokens, N = ⌈T / block_size⌉ blocks.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_TOKENS = 128
# No token has this id.
NO_TOKEN = -1


@dataclass(frozen=True)
class Mask:
    """Query q sees key k when k ≤ q, both lie in one document, and k is inside q's window.

    In tokens the window is q − k < window; in blocks it is q's block − k's block < window, so that a whole
    block is inside it or outside. With blocks of 4 tokens, a window of 2 blocks and a document that starts at
    token 6 (# visible):

        query   0 1 2 3   4 5 6 7   8 9 a b   c d e f
          3     # # # #
          5     # # # #   # #
          7                   # #
          9                   # #   # #
          d                         # # # #   # #
    """

    documents: Tensor  # (T,) int32, never decreasing: each document is one run of tokens
    window: Tensor  # 0-dim int32, at least 1, on the same device
    unit: Literal["tokens", "blocks"]
    block_size: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        documents, window = self.documents, self.window
        assert documents.ndim == 1, f"documents must be (T,), got {tuple(documents.shape)}"
        assert len(documents) > 0, "a mask needs at least one token"
        assert documents.dtype == torch.int32, f"documents must be int32, got {documents.dtype}"
        assert window.ndim == 0, f"the window must be one number, got shape {tuple(window.shape)}"
        assert window.dtype == torch.int32, f"the window must be int32, got {window.dtype}"
        assert window.device == documents.device, f"window on {window.device}, documents {documents.device}"
        assert self.unit in ("tokens", "blocks"), f"unknown window unit {self.unit!r}"
        # On an accelerator looking at values would make the host wait for it, so only the CPU checks them.
        if documents.device.type == "cpu" and not torch.compiler.is_compiling():
            assert int(window) >= 1, f"a window of {int(window)} hides a query from itself"
            assert bool((documents.diff() >= 0).all()), "document ids must never decrease"


class BlockLists(NamedTuple):
    """For each query block, its key blocks: `indices[i, :counts[i]]`, ascending. All int32.

    In a full block every query sees every key; in a partial one at least one pair is visible and one is not.
    A last block that T does not fill is never full.
    """

    partial_counts: Tensor  # (N,)
    partial_indices: Tensor  # (N, N)
    full_counts: Tensor  # (N,)
    full_indices: Tensor  # (N, N)


def document_ids(tokens: Tensor, end_of_text: int, chunk_tokens: int | None = None) -> Tensor:
    """(T,) int32: the running count of `end_of_text`, the token that stands at the start of a document.

    With `chunk_tokens` every chunk boundary starts a document too, for streams of shuffled chunks.
    """
    starts = tokens == end_of_text
    if chunk_tokens is not None:
        starts = starts | (torch.arange(len(tokens), device=tokens.device) % chunk_tokens == 0)
    return starts.cumsum(0, dtype=torch.int32)


def previous_tokens(tokens: Tensor, documents: Tensor) -> Tensor:
    """(T,): the token before each one, NO_TOKEN before the first of a document."""
    starts_document = F.pad(documents.diff() != 0, (1, 0), value=True)
    return tokens.roll(1).masked_fill(starts_document, NO_TOKEN)


def first_visible_keys(mask: Mask) -> Tensor:
    """(T,) int32: query q sees exactly the keys first_visible_keys[q] … q.

    Documents are runs and windows end at the query, so what a query sees is one interval; its start never
    decreases with q.
    """
    documents = mask.documents
    positions = torch.arange(len(documents), device=documents.device, dtype=torch.int32)
    document_starts = torch.searchsorted(documents, documents, out_int32=True)
    if mask.unit == "tokens":
        window_starts = positions - mask.window + 1
    else:
        window_starts = (positions // mask.block_size - mask.window + 1) * mask.block_size
    return torch.maximum(document_starts, window_starts).to(torch.int32)


def block_lists(mask: Mask) -> BlockLists:
    """The live key blocks of every query block, from each block's first and last document id alone.

    This is exact, not a bound. Ids never decrease, so a block before the diagonal has a live pair exactly
    when its last id is the query block's first id; that last key and that first query are also the closest
    pair in tokens. It is full exactly when its first id is the query block's last id and its first key is in
    the window of the last query.
    """
    size, total = mask.block_size, len(mask.documents)
    num_blocks = -(-total // size)
    blocks = torch.arange(num_blocks, device=mask.documents.device, dtype=torch.int32)
    first_N = mask.documents[::size]
    last_N = mask.documents[((blocks + 1) * size - 1).clamp(max=total - 1)]
    distance = blocks[:, None] - blocks[None, :]  # (N, N), in blocks, rows are query blocks

    if mask.unit == "tokens":
        nearest_in_window = distance * size - (size - 1) < mask.window
        farthest_in_window = distance * size + (size - 1) < mask.window
    else:
        nearest_in_window = farthest_in_window = distance < mask.window
    filled = (blocks + 1) * size <= total
    before = distance > 0
    live = (distance == 0) | (before & (last_N[None, :] == first_N[:, None]) & nearest_in_window)
    full = before & (first_N[None, :] == last_N[:, None]) & farthest_in_window & filled[:, None]
    return BlockLists(*_counts_and_indices(live & ~full), *_counts_and_indices(full))


def _counts_and_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    # A stable descending sort puts the chosen blocks first and leaves them in memory order.
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32), order.to(torch.int32)
