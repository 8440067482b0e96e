"""What one step of Muon sends, by kind of collective: from the plan alone, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hotlap.optim.chunks import GATHER_ENTRIES, MatrixSpec, plan_chunks


class Collectives(NamedTuple):
    """All collectives of one kind in a step."""

    kind: str  # all-gather, broadcast or all-reduce
    calls: int
    bytes: int  # of the updates that every rank has afterwards, its own included


def muon_traffic(
    specs: Sequence[MatrixSpec],
    world_size: int,
    dtype: torch.dtype,
    *,
    communication: str = "overlapped",
    gather_entries: int = GATHER_ENTRIES,
) -> list[Collectives]:
    """The collectives of one step; `dtype` is that of the updates, bfloat16 on CUDA.

    `specs` are all matrices in the order in which Muon is given them, on any device.
    """
    if world_size == 1:
        return []
    if communication == "flat":
        return [Collectives("all-reduce", 1, sum(spec.entries for spec in specs) * dtype.itemsize)]
    chunks = plan_chunks(specs, world_size, gather_entries)
    found = []
    for kind in ("all-gather", "broadcast"):
        of_kind = [chunk for chunk in chunks if chunk.collective == kind]
        # An owner broadcasts all that it has in a chunk at once.
        calls = sum(1 if kind == "all-gather" else len(set(chunk.owners)) for chunk in of_kind)
        entries = sum(len(chunk.members) * chunk.entries for chunk in of_kind)
        if calls:
            found.append(Collectives(kind, calls, entries * dtype.itemsize))
    return found
