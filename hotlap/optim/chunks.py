"""Which rank computes which matrix: matrices of the same spec form chunks, split across the ranks.

This is pure planning on indices. Every rank computes the same plan, so no communication is needed.
A single process puts all matrices of a spec into one chunk and computes them as a batch. Several
processes use chunks of one matrix per rank, or more where matrices are small: a collective has a
fixed latency, however few bytes it sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Target number of entries that each rank contributes to one all-gather.
GATHER_ENTRIES = 2**17


@dataclass(frozen=True)
class MatrixSpec:
    """Shape, dtype and device. Matrices of equal spec can be stacked to (count, rows, cols).

    `parts` is the number of matrices concatenated along the rows; each part has rows / parts rows.
    """

    rows: int
    cols: int
    parts: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, matrix: Tensor, parts: int) -> MatrixSpec:
        return cls(matrix.shape[0], matrix.shape[1], parts, matrix.dtype, matrix.device)


@dataclass(frozen=True)
class Chunk:
    """Indices of matrices of one spec.

    Rank r owns positions r·per_rank … (r + 1)·per_rank − 1 of `members`. In an uneven chunk the
    last ranks own fewer, or none.
    """

    spec: MatrixSpec
    members: tuple[int, ...]
    per_rank: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(matrices, rows, cols)"""
        return len(self.members), self.spec.rows, self.spec.cols

    def owner(self, position: int) -> int:
        return position // self.per_rank

    def owned_by(self, rank: int) -> range:
        first = rank * self.per_rank
        return range(min(first, len(self.members)), min(first + self.per_rank, len(self.members)))


def plan_chunks(
    specs: Sequence[MatrixSpec], world_size: int, gather_entries: int = GATHER_ENTRIES
) -> list[Chunk]:
    """Chunks that together hold each index of `specs` once.

    Large matrices come first, because no computation overlaps with the last all-gather.
    """
    by_spec: dict[MatrixSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(index)
    largest_first = sorted(by_spec.items(), key=lambda item: -item[0].rows * item[0].cols)
    chunks = []
    for spec, indices in largest_first:
        per_rank = len(indices) if world_size == 1 else max(1, gather_entries // (spec.rows * spec.cols))
        # The remainder is a chunk of its own, so that ranks differ by at most one matrix per spec.
        even = len(indices) - len(indices) % world_size
        for first, past in ((0, even), (even, len(indices))):
            for start in range(first, past, world_size * per_rank):
                members = tuple(indices[start : min(start + world_size * per_rank, past)])
                chunks.append(Chunk(spec, members, per_rank=math.ceil(len(members) / world_size)))
    return chunks


def plan_owners(specs: Sequence[MatrixSpec], world_size: int) -> list[int]:
    """The rank that owns each matrix, in the order of `specs`."""
    owners = [0] * len(specs)
    for chunk in plan_chunks(specs, world_size):
        for position, index in enumerate(chunk.members):
            owners[index] = chunk.owner(position)
    return owners
