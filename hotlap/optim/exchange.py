"""How ranks exchange their updates: not at all, overlapped chunk by chunk, or in one all-reduce.

Each `run_*` function performs one optimizer step over `chunks`, which must be the same on all
ranks. `compute(i)` returns the updates that this rank owns in chunk i, in the order of their
positions, as stacks of shape (count, rows, cols); a rank that owns none returns one stack of none.
`apply(i, updates)` receives the updates of all matrices of chunk i, each (rows, cols).

Every rank receives every update exactly once. Remainders are broadcast from their owners, one
broadcast per owner. Scattering each matrix over all ranks and all-gathering the pieces would need
only two collectives, but connects every owner with every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.optim.chunks import Chunk

Compute = Callable[[int], Sequence[Tensor]]
Apply = Callable[[int, Sequence[Tensor]], None]
# Called before each stage, with "compute", "gather-start", "wait" or "apply" and the chunk's index.
OnEvent = Callable[[str, int], None]


class _InFlight(NamedTuple):
    """A chunk on the wire: `flat` has the updates of all its matrices once `works` are waited for."""

    flat: Tensor
    works: list[dist.Work]


def run_single_rank(chunks: Sequence[Chunk], compute: Compute, apply: Apply, on_event: OnEvent) -> None:
    """Compute and apply each chunk, without communication."""
    for index in range(len(chunks)):
        on_event("compute", index)
        updates = [update for stack in compute(index) for update in stack]
        on_event("apply", index)
        apply(index, updates)


def run_overlapped(
    chunks: Sequence[Chunk],
    compute: Compute,
    apply: Apply,
    on_event: OnEvent,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Exchange chunk i while chunk i + 1 is computed; apply it while chunk i + 1 is exchanged."""
    previous: _InFlight | None = None

    def finish(index: int, exchange: _InFlight) -> None:
        on_event("wait", index)
        for work in exchange.works:
            work.wait()
        on_event("apply", index)
        apply(index, chunks[index].matrices(exchange.flat))

    for index, chunk in enumerate(chunks):
        on_event("compute", index)
        own = _flattened(compute(index))
        on_event("gather-start", index)
        exchange = _start_exchange(own, chunk, process_group)
        if previous:
            finish(index - 1, previous)
        previous = exchange
    if previous:
        finish(len(chunks) - 1, previous)


def run_flat(
    chunks: Sequence[Chunk],
    compute: Compute,
    apply: Apply,
    on_event: OnEvent,
    process_group: dist.ProcessGroup | None,
) -> None:
    """Compute all chunks, then all-reduce one flat vector, zero where another rank is the owner."""
    rank = dist.get_rank(process_group)
    sparse = []
    for index, chunk in enumerate(chunks):
        on_event("compute", index)
        own = _flattened(compute(index))
        updates = own.new_zeros(len(chunk.members) * chunk.entries)
        _owned_segment(updates, chunk, rank).copy_(own)
        sparse.append(updates)
    flat = torch.cat(sparse)
    on_event("wait", 0)
    dist.all_reduce(flat, group=process_group)
    summed = flat.split_with_sizes([len(updates) for updates in sparse])
    for index, (chunk, updates) in enumerate(zip(chunks, summed, strict=True)):
        on_event("apply", index)
        apply(index, chunk.matrices(updates))


def gather_chunk(
    own: Sequence[Tensor], chunk: Chunk, process_group: dist.ProcessGroup | None
) -> list[Tensor]:
    """All matrices of a chunk, each (rows, cols). `own` are the stacks that this rank owns."""
    exchange = _start_exchange(_flattened(own), chunk, process_group)
    for work in exchange.works:
        work.wait()
    return chunk.matrices(exchange.flat)


def _start_exchange(own: Tensor, chunk: Chunk, process_group: dist.ProcessGroup | None) -> _InFlight:
    """Send the matrices that this rank owns, one after another in the vector `own`, and receive all."""
    flat = own.new_empty(len(chunk.members) * chunk.entries)
    if chunk.collective == "all-gather":
        return _InFlight(flat, [all_gather(flat, own, group=process_group, async_op=True)])
    _owned_segment(flat, chunk, dist.get_rank(process_group)).copy_(own)
    works = []
    for owner in sorted(set(chunk.owners)):
        source = owner if process_group is None else dist.get_global_rank(process_group, owner)
        works.append(
            dist.broadcast(_owned_segment(flat, chunk, owner), source, group=process_group, async_op=True)
        )
    return _InFlight(flat, works)


def _owned_segment(flat: Tensor, chunk: Chunk, rank: int) -> Tensor:
    """The part of a chunk's vector that holds the matrices of one rank."""
    owned = chunk.owned_by(rank)
    return flat[owned.start * chunk.entries : owned.stop * chunk.entries]


def _flattened(stacks: Sequence[Tensor]) -> Tensor:
    return stacks[0].flatten() if len(stacks) == 1 else torch.cat([stack.flatten() for stack in stacks])


def all_gather(gathered: Tensor, own: Tensor, **options: Any) -> Any:
    # Newer releases of torch renamed the function and warn about the old name. It is looked up here
    # because a torch built without distributed support has neither.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(gathered, own, **options)
