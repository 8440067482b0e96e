"""Whether all ranks start from the same: found out before the first step, because later nothing shows it.

Gradients are averaged whatever they were computed from. A rank that took another checkpoint, reads other
shards or computes in another precision would spoil a run in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hotlap.errors import TrainingError


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
