"""Who computes which matrix: equal matrices are put in chunks, and every chunk is dealt out to the ranks.

Pure planning on indices, the same on every rank, so that all agree without talking. One process takes all
equal matrices as one chunk, to be computed as a batch; several take chunks of one matrix a rank, or of more
where matrices are small, since an exchange takes a while however little it carries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GATHER_ENTRIES = 2**17  # that a rank puts into one exchange, if it has so many


@dataclass(frozen=True)
class MatrixKind:
    """What matrices must share to be stacked. `parts` is how many blocks of rows each one consists of."""

    rows: int
    cols: int
    parts: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, matrix: Tensor, parts: int) -> MatrixKind:
        return cls(matrix.shape[0], matrix.shape[1], parts, matrix.dtype, matrix.device)


@dataclass(frozen=True)
class Chunk:
    """Indices of equal matrices. Rank r owns positions r·per_rank and up; the last ranks may own none."""

    kind: MatrixKind
    members: tuple[int, ...]
    per_rank: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.members), self.kind.rows, self.kind.cols

    def owner(self, position: int) -> int:
        return position // self.per_rank

    def owned_by(self, rank: int) -> range:
        first = rank * self.per_rank
        return range(min(first, len(self.members)), min(first + self.per_rank, len(self.members)))


def plan_chunks(
    kinds: Sequence[MatrixKind], world_size: int, gather_entries: int = GATHER_ENTRIES
) -> list[Chunk]:
    """Chunks that hold each index of `kinds` once. Large matrices first: nothing hides the last exchange."""
    by_kind: dict[MatrixKind, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(index)
    largest_first = sorted(by_kind.items(), key=lambda item: -item[0].rows * item[0].cols)
    chunks = []
    for kind, indices in largest_first:
        per_rank = len(indices) if world_size == 1 else max(1, gather_entries // (kind.rows * kind.cols))
        # What does not go round is a chunk of its own, so that no rank has two matrices more than another.
        even = len(indices) - len(indices) % world_size
        for first, past in ((0, even), (even, len(indices))):
            for start in range(first, past, world_size * per_rank):
                members = tuple(indices[start : min(start + world_size * per_rank, past)])
                chunks.append(Chunk(kind, members, per_rank=math.ceil(len(members) / world_size)))
    return chunks


def plan_owners(kinds: Sequence[MatrixKind], world_size: int) -> list[int]:
    """The owning rank of each index of `kinds`."""
    owners = [0] * len(kinds)
    for chunk in plan_chunks(kinds, world_size):
        for position, index in enumerate(chunk.members):
            owners[index] = chunk.owner(position)
    return owners
