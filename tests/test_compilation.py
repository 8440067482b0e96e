"""What is compiled before the clock starts: the shapes of the run, and the same on every rank."""

import pytest
import torch

from hotlap.train.clock import Clock
from hotlap.train.compilation import warm_up
from hotlap.train.distributed import process_group
from hotlap.train.interrupt import StopRequest
from hotlap.train.lap import build_lap
from hotlap.train.loop import Trainer
from hotlap.train.recorder import Recorder
from hotlap.train.snapshot import Progress, Snapshots
from tests.training import pico


# A step of `pico` has 4 sequences: fewer than a micro-batch, and not a multiple of one.
@pytest.mark.parametrize("micro_sequences", [16, 3])
def test_the_warm_up_sees_the_shapes_of_training_and_validation_and_no_others(
    tiny_data, monkeypatch, micro_sequences
):
    monkeypatch.setattr(Trainer, "_sample", lambda _: None)
    config = pico(tiny_data, 1, batch__micro_sequences=micro_sequences)
    clock, calls = Clock(), set()
    with process_group("cpu") as distributed:
        lap = build_lap(config, tiny_data, distributed, clock)
    lap.model.register_forward_pre_hook(
        lambda _, arguments: calls.add((len(arguments[0]), torch.is_grad_enabled()))
    )
    warm_up(lap.model, lap.masking, config, distributed)
    assert all(parameter.grad is None for parameter in lap.model.parameters())
    warmed_up = calls.copy()
    calls.clear()
    snapshots = Snapshots(None, config.checkpoint, 0)
    Trainer(lap, Progress(), clock, Recorder(), snapshots, StopRequest()).run()
    lap.data.loader.close()
    assert warmed_up == calls
