"""Whether all ranks start from the same: found out before the first step, because later nothing shows it.

Gradients are averaged whatever they were computed from. A rank that took another checkpoint, reads other
shards or computes in another precision would spoil a run in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hotlap.errors import TrainingError
from hotlap.kernels import unavailable
from hotlap.train.lap import Lap
from hotlap.train.snapshot import Progress


def check_same_start(lap: Lap, progress: Progress) -> None:
    """Refused on every rank where one differs."""
    check_same(facts_of(lap, progress))


def facts_of(lap: Lap, progress: Progress) -> dict[str, Any]:
    loader = lap.data.loader.state
    facts = {
        "step": progress.step,
        "position in the data": f"{loader.position} of epoch {loader.epoch}",
        "training shards": lap.data.train.fingerprint,
        "validation shards": lap.data.val.fingerprint,
        "precision": str(lap.dtype).removeprefix("torch."),
        "attention backend": lap.backend.name,
    }
    if lap.distributed.device.type == "cpu" and lap.dtype == torch.float32:
        facts["kernels in C"] = "none" if unavailable() else "there"
    return facts


def check_same(facts: Mapping[str, Any]) -> None:
    if not dist.is_initialized():
        return
    of_rank: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_rank, dict(facts))
    for name, main in of_rank[0].items():
        for rank, others in enumerate(of_rank):
            if others.get(name) != main:
                raise TrainingError(
                    expected=f"the same {name} on all ranks",
                    found=f"{main} on rank 0 and {others.get(name)} on rank {rank}",
                    do="give every node the same data, checkpoint, compiler and options",
                )
