"""Sums in one fixed binary tree: the same bits on any number of ranks.

Floating-point sums depend on their order. Here the order follows from the number of summands alone:
halves are summed on their own as long as the count is even, and what is left one after another. A
rank that holds an equal part of the summands holds a subtree if the number of ranks is a power of
two. Its sum is then a node of the tree that a single process would compute, and `sum_over_ranks`
adds up these nodes along the rest of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hotlap.optim.exchange import all_gather


def tree_sum(summands: Iterator[Tensor], count: int) -> Tensor:
    """The sum of `count` tensors, taken from `summands` one by one. Overwrites some of them.

    No more than log2(count) + 1 of them are held at a time.
    """
    assert count >= 1, "a sum of nothing has no shape"
    if count % 2 == 0:
        left = tree_sum(summands, count // 2)
        return left.add_(tree_sum(summands, count // 2))
    total = next(summands)
    for _ in range(count - 1):
        total.add_(next(summands))
    return total


def sum_over_ranks(own: Tensor) -> Tensor:
    """The sum of the vectors `own` of all ranks, on every rank. A collective.

    Each rank receives its slice of every rank's vector, adds up the slices, and sends the sum to all. That is
    as much on the wire as in an all-reduce.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    world_size = dist.get_world_size()
    padded = F.pad(own, (0, -len(own) % world_size))
    slices = padded.new_empty(world_size, len(padded) // world_size)
    dist.all_to_all_single(slices.view(-1), padded)
    all_gather(padded, tree_sum(iter(slices), world_size))
    return padded[: len(own)]
