"""Which keys a query sees, as data: a document id per token and a window, in tokens or in blocks.

Every attention backend takes the same `Mask`. Nothing here materializes a T×T tensor or
synchronizes with the device. The window is a tensor, so changing it does not trigger recompilation.

Shapes: T tokens, N = ⌈T / block_size⌉ blocks.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_TOKENS = 128
NO_TOKEN = -1  # not a token id


@dataclass(frozen=True)
class Mask:
    """Query q sees key k if k ≤ q, both are in the same document, and k is inside the window of q.

    A window in tokens means q − k < window. A window in blocks means
    block of q − block of k < window, so that a block is inside it as a whole or not at all. Example
    with blocks of 4 tokens, a window of 2 blocks and a document that starts at token 6 (# visible):

        query   0 1 2 3   4 5 6 7   8 9 a b   c d e f
          3     # # # #
          5     # # # #   # #
          7                   # #
          9                   # #   # #
          d                         # # # #   # #
    """

    documents: Tensor  # (T,) int32, non-decreasing: the tokens of a document are contiguous
    window: Tensor  # () int32, at least 1, on the same device
    unit: Literal["tokens", "blocks"]
    block_size: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        documents, window = self.documents, self.window
        assert documents.ndim == 1, f"documents must be (T,), got {tuple(documents.shape)}"
        assert len(documents) > 0, "a mask needs at least one token"
        assert documents.dtype == torch.int32, f"documents must be int32, got {documents.dtype}"
        assert window.ndim == 0, f"the window must be a 0-dim tensor, got shape {tuple(window.shape)}"
        assert window.dtype == torch.int32, f"the window must be int32, got {window.dtype}"
        assert window.device == documents.device, f"window on {window.device}, not {documents.device}"
        assert self.unit in ("tokens", "blocks"), f"unknown window unit {self.unit!r}"
        # Checked only on the CPU: reading values from an accelerator would synchronize with it.
        if documents.device.type == "cpu" and not torch.compiler.is_compiling():
            assert int(window) >= 1, f"a window of {int(window)} hides a query from itself"
            assert bool((documents.diff() >= 0).all()), "document ids must not decrease"


class BlockLists(NamedTuple):
    """The key blocks that query block i visits: `indices[i, :counts[i]]`, ascending. All int32.

    In a full block every query sees every key. In a partial block some pairs are visible and some
    are not. A last block that T does not fill is never full.
    """

    partial_counts: Tensor  # (N,)
    partial_indices: Tensor  # (N, N)
    full_counts: Tensor  # (N,)
    full_indices: Tensor  # (N, N)


def document_ids(tokens: Tensor, end_of_text: int, chunk_tokens: int | None = None) -> Tensor:
    """(T,) int32: the running count of `end_of_text`, which is the first token of every document.

    With `chunk_tokens`, every multiple of it starts a document too, for shuffled chunks.
    """
    starts = tokens == end_of_text
    if chunk_tokens is not None:
        starts = starts | (torch.arange(len(tokens), device=tokens.device) % chunk_tokens == 0)
    return starts.cumsum(0, dtype=torch.int32)


def previous_tokens(tokens: Tensor, documents: Tensor) -> Tensor:
    """(T,): the token before each one, NO_TOKEN at the start of a document."""
    starts_document = F.pad(documents.diff() != 0, (1, 0), value=True)
    return tokens.roll(1).masked_fill(starts_document, NO_TOKEN)


def first_visible_keys(mask: Mask) -> Tensor:
    """(T,) int32: query q sees exactly the keys first_visible_keys[q] … q.

    Documents are contiguous and a window ends at its query, so the visible keys form one interval.
    Its start does not decrease with q.
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
    """The visible key blocks of every query block, from the first and last document id per block.

    This is exact, not a bound. Document ids do not decrease, so a key block before the diagonal
    shares a document with the query block if and only if its last id equals the first id of the
    query block. That last key and first query are also the closest pair, so the window is tested on
    them. The key block is full if and only if its first id equals the last id of the query block
    and its first key is in the window of the last query.
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
    visible = (distance == 0) | (before & (last_N[None, :] == first_N[:, None]) & nearest_in_window)
    full = before & (first_N[None, :] == last_N[:, None]) & farthest_in_window & filled[:, None]
    return BlockLists(*_counts_and_indices(visible & ~full), *_counts_and_indices(full))


def _counts_and_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    # A stable descending sort puts the chosen blocks first, in ascending order.
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32), order.to(torch.int32)
