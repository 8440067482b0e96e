"""How ranks exchange their updates: not at all, overlapped chunk by chunk, or in one all-reduce.

Each `run_*` function performs one optimizer step over `chunks`, which must be the same on all
ranks. `compute(i)` returns the updates that this rank owns in chunk i, (owned, rows, cols).
`apply(i, updates)` receives the updates of all matrices of chunk i, (matrices, rows, cols).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.optim.chunks import Chunk

Compute = Callable[[int], Tensor]
Apply = Callable[[int, Tensor], None]
# Called before each stage, with "compute", "gather-start", "wait" or "apply" and the chunk's index.
OnEvent = Callable[[str, int], None]


def run_single_rank(chunks: Sequence[Chunk], compute: Compute, apply: Apply, on_event: OnEvent) -> None:
    """Compute and apply each chunk, without communication."""
    for index in range(len(chunks)):
        on_event("compute", index)
        updates = compute(index)
        on_event("apply", index)
        apply(index, updates)


def run_overlapped(
    chunks: Sequence[Chunk],
    compute: Compute,
    apply: Apply,
    on_event: OnEvent,
    process_group: dist.ProcessGroup | None,
) -> None:
    """All-gather chunk i while chunk i + 1 is computed; apply it while chunk i + 1 is gathered."""
    world_size = dist.get_world_size(process_group)
    in_flight: tuple[int, dist.Work, Tensor] | None = None

    def finish(index: int, gathering: dist.Work, updates: Tensor) -> None:
        on_event("wait", index)
        gathering.wait()
        on_event("apply", index)
        apply(index, updates)

    for index, chunk in enumerate(chunks):
        on_event("compute", index)
        own = _pad_to_slots(compute(index), chunk)
        updates = own.new_empty((world_size * chunk.per_rank, *own.shape[1:]))
        on_event("gather-start", index)
        gathering = _all_gather(updates, own, group=process_group, async_op=True)
        if in_flight:
            finish(*in_flight)
        in_flight = (index, gathering, updates)
    if in_flight:
        finish(*in_flight)


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
        own = compute(index)
        updates = own.new_zeros(chunk.shape)
        updates[chunk.owned_by(rank).start : chunk.owned_by(rank).stop] = own
        sparse.append(updates.flatten())
    flat = torch.cat(sparse)
    on_event("wait", 0)
    dist.all_reduce(flat, group=process_group)
    summed = flat.split_with_sizes([len(updates) for updates in sparse])
    for index, (chunk, updates) in enumerate(zip(chunks, summed, strict=True)):
        on_event("apply", index)
        apply(index, updates.view(chunk.shape))


def gather_chunk(own: Tensor, chunk: Chunk, process_group: dist.ProcessGroup | None) -> Tensor:
    """All matrices of a chunk, (matrices, rows, cols), in the order of its members.

    `own` holds the matrices that this rank owns, (owned, rows, cols).
    """
    own = _pad_to_slots(own, chunk)
    world_size = dist.get_world_size(process_group)
    gathered = own.new_empty((world_size * chunk.per_rank, *own.shape[1:]))
    _all_gather(gathered, own, group=process_group)
    return gathered[: len(chunk.members)]


def _all_gather(gathered: Tensor, own: Tensor, **options: Any) -> Any:
    # Newer releases of torch renamed the function and warn about the old name. It is looked up here
    # because a torch built without distributed support has neither.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(gathered, own, **options)


def _pad_to_slots(own: Tensor, chunk: Chunk) -> Tensor:
    """Zero-pad to (per_rank, rows, cols): an all-gather needs the same shape on every rank."""
    missing = chunk.per_rank - own.shape[0]
    if missing:
        own = torch.cat([own, own.new_zeros((missing, *own.shape[1:]))])
    return own.contiguous()
