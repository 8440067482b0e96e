"""Validation: mean loss and bits per byte on a fixed set of tokens, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.config import EvaluationConfig
from hotlap.data.loader import Batch
from hotlap.data.validation import ValidationBatches
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.flops import bits_per_byte

# As the builtin map; may compute several batches at once.
Map = Callable[[Callable[[Batch], Tensor], Iterable[Batch]], Iterable[Tensor]]


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token
    bpb: float | None  # bits per byte; None if the number of bytes is unknown


def evaluate(
    batch_loss: BatchLoss,
    batches: ValidationBatches,
    bytes_per_token: float | None,
    map_batches: Map = map,
) -> Evaluation:
    """Each rank evaluates its sequences; all ranks return the same result. A collective."""

    @torch.no_grad()  # not around the call: each thread has its own mode
    def loss_of(batch: Batch) -> Tensor:
        tokens, targets = batch.inputs.flatten(), batch.targets.flatten()
        return batch_loss(tokens, targets, batch.chunk_tokens, reduction="sum")

    # On the CPU, because some devices have no float64.
    of_sequences = torch.zeros(batches.num_sequences, dtype=torch.float64)
    sums = list(map_batches(loss_of, batches))
    if sums:
        of_sequences[batches.own_sequences] = torch.stack(sums).cpu().double()
    if dist.is_initialized():
        # Each is summed with zeros: then all ranks add them up in the same order as a single process.
        of_sequences = of_sequences.to(batches.device)
        dist.all_reduce(of_sequences)
    loss = of_sequences.sum().item() / batches.tokens
    return Evaluation(loss, bits_per_byte(loss, bytes_per_token) if bytes_per_token else None)


def reaches_target(loss: float, bpb: float | None, settings: EvaluationConfig) -> bool:
    if settings.target_loss is not None:
        return loss <= settings.target_loss
    return settings.target_bpb is not None and bpb is not None and bpb <= settings.target_bpb
