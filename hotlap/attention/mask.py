"""Which keys a query sees, as data: a document id per token and a window, in tokens, blocks or both.

Every attention backend takes the same `Mask`. Nothing here materializes a T×T tensor or
synchronizes with the device. The window is a tensor, so changing it does not trigger recompilation.

Shapes: T tokens, N = ⌈T / block_size⌉ blocks.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

WindowUnit = Literal["tokens", "blocks", "tokens-and-blocks"]
WINDOW_UNITS: tuple[WindowUnit, ...] = get_args(WindowUnit)

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

    In tokens and blocks, a window in tokens also limits the blocks: q − k < window and
    block of q − block of k < ⌈window / block_size⌉. A query early in its block then sees fewer keys
    than the window holds. Example with a window of 6 tokens, which are 2 blocks (. in the window of
    6 tokens, but not in the 2 blocks):

        query   0 1 2 3   4 5 6 7   8 9 a b   c d e f
          7         # #   # # # #
          8           .   # # # #   #
          b                   # #   # # # #
          c                     .   # # # #   #
    """

    documents: Tensor  # (T,) int32, non-decreasing: the tokens of a document are contiguous
    window: Tensor  # () int32, at least 1, on the same device; in blocks if `unit` is blocks, else tokens
    unit: WindowUnit
    block_size: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        documents, window = self.documents, self.window
        assert documents.ndim == 1, f"documents must be (T,), got {tuple(documents.shape)}"
        assert len(documents) > 0, "a mask needs at least one token"
        assert documents.dtype == torch.int32, f"documents must be int32, got {documents.dtype}"
        assert window.ndim == 0, f"the window must be a 0-dim tensor, got shape {tuple(window.shape)}"
        assert window.dtype == torch.int32, f"the window must be int32, got {window.dtype}"
        assert window.device == documents.device, f"window on {window.device}, not {documents.device}"
        assert self.unit in WINDOW_UNITS, f"unknown window unit {self.unit!r}"
        # Checked only on the CPU: reading values from an accelerator would synchronize with it.
        if documents.device.type == "cpu" and not torch.compiler.is_compiling():
            assert int(window) >= 1, f"a window of {int(window)} hides a query from itself"
            assert bool((documents.diff() >= 0).all()), "document ids must not decrease"

    @property
    def limits_tokens(self) -> bool:
        return self.unit != "blocks"

    @property
    def limits_blocks(self) -> bool:
        return self.unit != "tokens"

    @property
    def window_blocks(self) -> Tensor:
        """() int32: the window in blocks, rounded up to whole ones. Only if `limits_blocks`."""
        assert self.limits_blocks, "a window in tokens alone has no limit in blocks"
        if self.unit == "blocks":
            return self.window
        return (self.window + self.block_size - 1) // self.block_size


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
    first = torch.searchsorted(documents, documents, out_int32=True)  # of the query's document
    if mask.limits_tokens:
        first = torch.maximum(first, positions - mask.window + 1)
    if mask.limits_blocks:
        first_block = positions // mask.block_size - mask.window_blocks + 1
        first = torch.maximum(first, first_block * mask.block_size)
    return first.to(torch.int32)


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

    before = distance > 0
    if mask.limits_blocks:  # the same for all pairs of tokens in a pair of blocks
        before = before & (distance < mask.window_blocks)
    nearest_in_window = farthest_in_window = before
    if mask.limits_tokens:
        nearest_in_window = before & (distance * size - (size - 1) < mask.window)
        farthest_in_window = before & (distance * size + (size - 1) < mask.window)
    filled = (blocks + 1) * size <= total
    visible = (distance == 0) | ((last_N[None, :] == first_N[:, None]) & nearest_in_window)
    full = (first_N[None, :] == last_N[:, None]) & farthest_in_window & filled[:, None]
    return BlockLists(*_counts_and_indices(visible & ~full), *_counts_and_indices(full))


def _counts_and_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    # A stable descending sort puts the chosen blocks first, in ascending order.
    order = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32), order.to(torch.int32)
