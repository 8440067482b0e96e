"""The gradients of one step, in `grad` of every parameter, and the step's loss.

`averaged` leaves the reduction to DDP, which overlaps it with the backward. `summed_in_order` sums
the gradients of single sequences in one fixed tree, so that they are the same bits on any number of
ranks and threads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hotlap.data.loader import Batch
from hotlap.distributed.fixed_sum import sum_over_ranks, tree_sum
from hotlap.train.lap import Lap
from hotlap.train.workers import Workers

# Every gradient begins at a cache line of the vector that holds them all, as if it were alone.
CACHE_LINE_FLOATS = 16


def averaged(lap: Lap, batch: Batch) -> Tensor:
    """Returns the mean loss over this rank's tokens, detached."""
    micro = lap.config.batch.micro_sequences
    starts = range(0, len(batch.inputs), micro)
    total = torch.zeros((), device=lap.distributed.device)
    for start in starts:
        inputs, targets = batch.inputs[start : start + micro], batch.targets[start : start + micro]
        last = start == starts[-1]
        with contextlib.nullcontext() if last else _no_sync(lap):
            share = len(inputs) / len(batch.inputs)
            chunk_tokens = batch.chunk_tokens or inputs.size(1)
            loss = share * lap.module(inputs.flatten(), targets.flatten(), chunk_tokens)
            loss.backward()
        total += loss.detach()
    return total


def _no_sync(lap: Lap) -> contextlib.AbstractContextManager[Any]:
    module = lap.module
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()


def summed_in_order(lap: Lap, workers: Workers, batch: Batch) -> Tensor:
    """Returns the mean loss over the tokens of all ranks, detached."""
    parameters = [p for p in lap.model.parameters() if p.requires_grad]
    share = lap.config.batch.sequence_tokens / lap.config.batch.tokens_per_step

    def of_sequence(index: int) -> Tensor:
        inputs, targets = batch.inputs[index], batch.targets[index]
        loss = share * lap.module(inputs, targets, batch.chunk_tokens or len(inputs))
        return _packed([*torch.autograd.grad(loss, parameters), loss.detach()])

    count = len(batch.inputs)
    own = tree_sum(workers.map(of_sequence, range(count)), count)
    *gradients, loss = _unpacked(sum_over_ranks(own), [p.shape for p in parameters] + [torch.Size()])
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    return loss


def _packed(tensors: list[Tensor]) -> Tensor:
    """One float32 vector: sums of gradients in bfloat16 would lose what a sequence adds."""
    vector = torch.zeros(sum(_room(x.numel()) for x in tensors))
    for part, x in zip(_unpacked(vector, [x.shape for x in tensors]), tensors, strict=True):
        part.copy_(x)
    return vector


def _unpacked(vector: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    rooms = vector.split_with_sizes([_room(shape.numel()) for shape in shapes])
    return [room[: shape.numel()].view(shape) for room, shape in zip(rooms, shapes, strict=True)]


def _room(count: int) -> int:
    return -(-count // CACHE_LINE_FLOATS) * CACHE_LINE_FLOATS
