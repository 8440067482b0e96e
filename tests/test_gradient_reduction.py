"""Ranks exchange gradients once per step, for any number of micro-batches, and without a copy of them."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hotlap.distributed.process_group import Distributed
from hotlap.distributed.signals import StopRequest
from hotlap.runs.recorder import Recorder
from hotlap.train.clock import Clock
from hotlap.train.lap import build_lap
from hotlap.train.loop import Trainer
from hotlap.train.snapshot import Snapshots, TrainingProgress
from tests.ranks import run_ranks
from tests.training import pico

WORLD_SIZE = 2
STEP_TOKENS = 4096  # four sequences of 512 per rank


def accumulate(rank, world_size, data, micro_sequences):
    """Of one step: the number of all-reduces, the storages of the gradients, and the number of gradients."""
    config = pico(data, 2, batch__tokens_per_step=STEP_TOKENS, batch__micro_sequences=micro_sequences)
    distributed = Distributed(rank, rank, world_size, world_size, torch.device("cpu"), has_group=True)
    lap = build_lap(config, data, distributed, Clock())
    snapshots = Snapshots(None, config.checkpoint, TrainingProgress())
    trainer = Trainer(lap, TrainingProgress(), Clock(), Recorder(), snapshots, StopRequest())
    trainer._accumulate_gradients()  # DDP chooses its buckets by the order of gradients in the first step
    lap.module.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer._accumulate_gradients()
    lap.data.loader.close()
    gradients = [parameter.grad for parameter in lap.model.parameters()]
    storages = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    reductions = sum(event.name == "c10d::allreduce_" for event in seen.events())
    return reductions, len(storages), len(gradients)


@pytest.fixture(scope="module")
def whole_batch(tiny_data):
    return run_ranks(accumulate, WORLD_SIZE, tiny_data, 4)


@pytest.mark.parametrize("micro_sequences", [1, 3])
def test_only_the_last_micro_batch_reduces_gradients(whole_batch, tiny_data, micro_sequences):
    in_parts = run_ranks(accumulate, WORLD_SIZE, tiny_data, micro_sequences)
    for (reductions, *_), (expected, *_) in zip(in_parts, whole_batch, strict=True):
        assert expected > 0
        assert reductions == expected


def test_gradients_are_views_of_the_buckets_that_are_reduced(whole_batch):
    for reductions, storages, gradients in whole_batch:
        assert storages <= reductions < gradients
