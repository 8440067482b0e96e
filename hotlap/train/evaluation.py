"""Validation: mean loss and bits per byte on a fixed set of tokens, for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hotlap.config import EvaluationConfig
from hotlap.data.validation import ValidationBatches
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.flops import bits_per_byte


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token
    bpb: float | None  # bits per byte; None if the number of bytes is unknown


@torch.no_grad()
def evaluate(batch_loss: BatchLoss, batches: ValidationBatches, bytes_per_token: float | None) -> Evaluation:
    """Each rank evaluates its sequences; all ranks return the same result. A collective."""
    sums = []
    for batch in batches:
        tokens, targets = batch.inputs.flatten(), batch.targets.flatten()
        sums.append(batch_loss(tokens, targets, batch.chunk_tokens, reduction="sum"))
    # Summed in float64, so that the result does not depend on how sequences are split across ranks.
    # Summed on the CPU, because some devices have no float64.
    nats = torch.stack(sums).cpu().double().sum() if sums else torch.zeros((), dtype=torch.float64)
    if dist.is_initialized():
        nats = nats.to(batches.device)
        dist.all_reduce(nats)
    loss = nats.item() / batches.tokens
    return Evaluation(loss, bits_per_byte(loss, bytes_per_token) if bytes_per_token else None)


def reaches_target(loss: float, bpb: float | None, settings: EvaluationConfig) -> bool:
    if settings.target_loss is not None:
        return loss <= settings.target_loss
    return settings.target_bpb is not None and bpb is not None and bpb <= settings.target_bpb
