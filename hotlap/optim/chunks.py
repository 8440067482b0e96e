"""Which rank computes which matrix, and which updates the ranks exchange together.

This is pure planning on indices. Every rank computes the same plan, so no communication is needed.
A single process puts all matrices of a spec into one chunk and computes them as a batch.

On several ranks, matrices with the same number of entries (and equal work) share chunks: in a flat
buffer 768×3072 and 3072×768 are alike. A chunk has one matrix per rank, or several where matrices
are small, because a collective has a fixed latency, however few bytes it sends. Every rank
contributes equally to it, so that one all-gather exchanges it. The remainder of fewer matrices than
ranks goes to the ranks with the least work so far, and each owner broadcasts its own: an all-gather
would have to pad it to one matrix per rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from hotlap.optim.newton_schulz import flops_per_step

# Target number of entries that each rank contributes to one all-gather.
GATHER_ENTRIES = 2**17


@dataclass(frozen=True)
class MatrixSpec:
    """Shape, dtype and device. Matrices of equal spec can be stacked to (count, rows, cols).

    `parts` is the number of matrices concatenated along the rows; each part has rows / parts rows.
    `group` is the index of the parameter group, whose momentum all matrices of a stack share.
    """

    rows: int
    cols: int
    parts: int
    dtype: torch.dtype
    device: torch.device
    group: int = 0

    @classmethod
    def of(cls, matrix: Tensor, parts: int, group: int = 0) -> MatrixSpec:
        return cls(matrix.shape[0], matrix.shape[1], parts, matrix.dtype, matrix.device, group)

    @property
    def entries(self) -> int:
        return self.rows * self.cols

    @property
    def work(self) -> int:
        """FLOPs of one Newton-Schulz step, to compare matrices with each other."""
        return self.parts * flops_per_step(self.rows // self.parts, self.cols)


@dataclass(frozen=True)
class Chunk:
    """Matrices that the ranks exchange together, ordered by owner.

    `members` are their indices; `specs` and `owners` belong to each member. All have the same number of
    entries. With the all-gather every rank owns equally many of them, with broadcasts some own none.
    """

    members: tuple[int, ...]
    specs: tuple[MatrixSpec, ...]
    owners: tuple[int, ...]
    collective: Literal["all-gather", "broadcast"]

    @property
    def entries(self) -> int:
        """Of each matrix."""
        return self.specs[0].entries

    def owned_by(self, rank: int) -> range:
        """Positions in `members`."""
        return range(bisect_left(self.owners, rank), bisect_right(self.owners, rank))

    def stacks_of(self, rank: int) -> list[range]:
        """What a rank owns, split into runs of positions whose matrices can be stacked."""
        runs = groupby(self.owned_by(rank), key=lambda position: self.specs[position])
        return [range(run[0], run[-1] + 1) for run in (list(positions) for _, positions in runs)]

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Views of shape (rows, cols) of a vector that holds the matrices one after another."""
        parts = flat.view(len(self.members), self.entries)
        return [part.view(spec.rows, spec.cols) for part, spec in zip(parts, self.specs, strict=True)]


def plan_chunks(
    specs: Sequence[MatrixSpec], world_size: int, gather_entries: int = GATHER_ENTRIES
) -> list[Chunk]:
    """Chunks that together hold each index of `specs` once.

    Large matrices come first, because no computation overlaps with the last exchange.
    """
    exchangeable: dict[Hashable, dict[MatrixSpec, list[int]]] = {}
    for index, spec in enumerate(specs):
        # A single process exchanges nothing. On several ranks, equal work keeps them balanced.
        key = spec if world_size == 1 else (spec.entries, spec.work, spec.dtype, spec.device)
        exchangeable.setdefault(key, {}).setdefault(spec, []).append(index)
    chunks = []
    # By rank, of remainders alone: what is shared evenly is equal work on every rank.
    work = [0] * world_size
    for by_spec in sorted(exchangeable.values(), key=lambda by_spec: -next(iter(by_spec)).entries):
        # Equal specs are adjacent, so that what a rank owns of a chunk can be stacked.
        indices = [index for same in by_spec.values() for index in same]
        even = len(indices) - len(indices) % world_size
        entries = specs[indices[0]].entries
        at_once = even if world_size == 1 else world_size * max(1, gather_entries // entries)
        for start in range(0, even, at_once):
            chunks.append(_share_evenly(indices[start : min(start + at_once, even)], specs, world_size))
        if even < len(indices):
            chunks.append(_share_remainder(indices[even:], specs, work))
    return chunks


def plan_owners(specs: Sequence[MatrixSpec], world_size: int) -> list[int]:
    """The rank that owns each matrix, in the order of `specs`."""
    owners = [0] * len(specs)
    for chunk in plan_chunks(specs, world_size):
        for index, owner in zip(chunk.members, chunk.owners, strict=True):
            owners[index] = owner
    return owners


def _share_evenly(indices: Sequence[int], specs: Sequence[MatrixSpec], world_size: int) -> Chunk:
    """Give each rank equally many matrices, and neighbors to the same rank."""
    per_rank = len(indices) // world_size
    owners = tuple(position // per_rank for position in range(len(indices)))
    return Chunk(tuple(indices), tuple(specs[index] for index in indices), owners, "all-gather")


def _share_remainder(indices: Sequence[int], specs: Sequence[MatrixSpec], work: list[int]) -> Chunk:
    """Give each matrix to the rank with the least `work` so far, to which this adds."""
    owned = []
    for index in indices:
        owner = min(range(len(work)), key=lambda rank: work[rank])
        work[owner] += specs[index].work
        owned.append((owner, index))
    owners, members = zip(*sorted(owned, key=lambda pair: pair[0]), strict=True)
    return Chunk(members, tuple(specs[index] for index in members), owners, "broadcast")
