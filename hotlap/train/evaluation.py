"""Validation: mean loss and bits per byte on a fixed set of tokens, for any number of ranks.

Validations before the last may evaluate fewer tokens, the same ones each time, so that they can be compared
with each other. What ends a run (its last step, its target, its patience) is measured on all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.config import Config, EvaluationConfig
from hotlap.data.loader import Batch
from hotlap.data.validation import ValidationBatches
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.flops import bits_per_byte

# As the builtin map; may compute several batches at once.
Map = Callable[[Callable[[Batch], Tensor], Iterable[Batch]], Iterable[Tensor]]
# A validation on fewer tokens that is this close to the target is repeated on all of them.
NEAR_TARGET = 1.03


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token
    bpb: float | None  # bits per byte; None if the number of bytes is unknown
    tokens: int | None = None  # that were evaluated; None in older checkpoints
    # On the tokens that every validation of the run evaluates; None if these are all.
    common_loss: float | None = None

    @property
    def comparable_loss(self) -> float:
        """The loss to compare with other validations of the run."""
        return self.loss if self.common_loss is None else self.common_loss

    @property
    def comparable_bpb(self) -> float | None:
        return None if self.bpb is None else self.bpb * self.comparable_loss / self.loss


@dataclass(frozen=True)
class ValidationParts:
    common: ValidationBatches  # what every validation evaluates
    rest: ValidationBatches  # what is added to it for a result; may be empty


def split_validation(batches: ValidationBatches, config: Config) -> ValidationParts:
    """Two parts, of which the first costs all validations before the last `evaluation.share` at most.

    A token costs less to validate than to train on, so a share of the tokens is at most that of the time.
    """
    share, every_steps = config.evaluation.share, config.evaluation.every_steps
    if share is None or every_steps == 0:
        return ValidationParts(batches, batches.split(batches.tokens)[1])
    before_the_last = -(-config.schedule.steps // every_steps)  # at steps 0, `every_steps`, …
    trained = config.schedule.steps * config.batch.tokens_per_step
    return ValidationParts(*batches.split(int(share * trained / max(1, before_the_last))))


def evaluate(
    batch_loss: BatchLoss,
    batches: ValidationBatches,
    bytes_per_token: float | None,
    map_batches: Map = map,
) -> Evaluation:
    """Each rank evaluates its sequences; all ranks return the same result. A collective."""
    return _evaluation(total_nats(batch_loss, batches, map_batches), batches.tokens, bytes_per_token)


def validate(
    batch_loss: BatchLoss,
    parts: ValidationParts,
    bytes_per_token: float | None,
    needs_all: Callable[[Evaluation], bool],
    map_batches: Map = map,
) -> Evaluation:
    """Evaluate the common part, and the rest if the result on that part `needs_all`. A collective."""
    nats = total_nats(batch_loss, parts.common, map_batches)
    common = _evaluation(nats, parts.common.tokens, bytes_per_token)
    if not parts.rest.tokens or not needs_all(common):
        return common
    nats += total_nats(batch_loss, parts.rest, map_batches)
    tokens = parts.common.tokens + parts.rest.tokens
    return _evaluation(nats, tokens, bytes_per_token, common_loss=common.loss)


def total_nats(batch_loss: BatchLoss, batches: ValidationBatches, map_batches: Map = map) -> float:
    """Summed over the tokens of all ranks."""

    @torch.no_grad()  # not around the call: each thread has its own mode
    def loss_of(batch: Batch) -> Tensor:
        tokens, targets = batch.inputs.flatten(), batch.targets.flatten()
        return batch_loss(tokens, targets, batch.chunk_tokens, reduction="sum")

    # On the CPU, because some devices have no float64.
    of_sequences = torch.zeros(batches.num_sequences, dtype=torch.float64)
    own: Tensor | None = None
    for number, nats in enumerate(map_batches(loss_of, batches)):
        # Into one tensor, so that no list of scalars lives as long as the validation.
        own = nats.new_empty(len(batches)) if own is None else own
        own[number] = nats
    if own is not None:
        of_sequences[batches.own_sequences] = own.cpu().double()
    if dist.is_initialized():
        # Each is summed with zeros: then all ranks add them up in the same order as a single process.
        of_sequences = of_sequences.to(batches.device)
        dist.all_reduce(of_sequences)
    return of_sequences.sum().item()


def _evaluation(
    nats: float, tokens: int, bytes_per_token: float | None, common_loss: float | None = None
) -> Evaluation:
    loss = nats / tokens
    bpb = bits_per_byte(loss, bytes_per_token) if bytes_per_token else None
    return Evaluation(loss, bpb, tokens, common_loss)


def reaches_target(loss: float, bpb: float | None, settings: EvaluationConfig) -> bool:
    if settings.target_loss is not None:
        return loss <= settings.target_loss
    return settings.target_bpb is not None and bpb is not None and bpb <= settings.target_bpb


def may_reach_target(common: Evaluation, settings: EvaluationConfig) -> bool:
    """Whether all tokens have to be evaluated to know it."""
    bpb = None if common.bpb is None else common.bpb / NEAR_TARGET
    return reaches_target(common.loss / NEAR_TARGET, bpb, settings)
