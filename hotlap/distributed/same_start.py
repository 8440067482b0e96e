"""Checks before the first step that all ranks start from the same state.

Gradients are averaged whatever they were computed from. A rank that loaded another checkpoint,
reads other shards or computes in another precision would silently corrupt the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hotlap.errors import TrainingError


def check_same(facts: Mapping[str, Any]) -> None:
    """Raise on every rank if a value differs between ranks.

    A collective: every rank must call it.
    """
    if not dist.is_initialized():
        return
    facts_of_rank: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(facts_of_rank, dict(facts))
    for name, main in facts_of_rank[0].items():
        for rank, others in enumerate(facts_of_rank):
            if others.get(name) != main:
                raise TrainingError(
                    expected=f"the same {name} on all ranks",
                    found=f"{main} on rank 0 and {others.get(name)} on rank {rank}",
                    do="use the same data, checkpoint, compiler and options on every node",
                )
