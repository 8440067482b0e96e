"""What one rank sends in a step, by collective."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hotlap.config import Config
from hotlap.model import GPT, GPT2
from hotlap.optim.traffic import muon_traffic
from hotlap.plan.state import matrix_specs, total_bytes

FIGURES = 3  # float32 values that the ranks exchange per step: loss, stop requests, overdue checkpoint


class Traffic(NamedTuple):
    what: str
    collective: str  # all-reduce, all-gather or broadcast
    payload_bytes: int  # of the tensors
    sent_bytes: float  # by one rank: in a ring, the mean over the ranks


def step_traffic(model: GPT | GPT2, config: Config, world_size: int, dtype: torch.dtype) -> list[Traffic]:
    """Gradients in the dtype of their parameter, Muon's updates in `dtype`, and a step's figures."""
    if world_size == 1:
        return []
    found = [traffic("gradients", "all-reduce", total_bytes(model.parameters()), world_size)]
    specs = matrix_specs(model, config)
    if specs:
        kinds = muon_traffic(specs, world_size, dtype, communication=config.optim.muon.communication)
        found += [traffic("Muon's updates", each.kind, each.bytes, world_size) for each in kinds]
    found.append(traffic("loss and flags", "all-reduce", FIGURES * 4, world_size))
    return found


def traffic(what: str, collective: str, payload_bytes: int, world_size: int) -> Traffic:
    """In a ring every rank passes on all but its own part, once; an all-reduce goes around twice."""
    rounds = 2 if collective == "all-reduce" else 1
    return Traffic(what, collective, payload_bytes, rounds * (world_size - 1) / world_size * payload_bytes)
