"""Reading the loss one step late, as on CUDA: the same run, decided one step later."""

import math
import os
import signal

import pytest
import torch

from hotlap.errors import DivergenceError
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.train import loop
from hotlap.train.loop import Trainer
from hotlap.train.readback import Readback
from tests.ranks import run_ranks
from tests.training import final_weights, losses, pico, train


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(loop, "reads_late", lambda _: True)


def before_step(monkeypatch, number, act):
    """Call `act(trainer)` before the gradients of a step, counted from 1."""
    original = Trainer._accumulate_gradients

    def accumulate(self):
        if self.progress.step == number - 1:
            act(self)
        return original(self)

    monkeypatch.setattr(Trainer, "_accumulate_gradients", accumulate)


def trained(name, root):
    return [line for line in RunDirectory(root / name).read_metrics().lines if line["kind"] == "train"]


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_run_has_the_same_bits_whenever_its_losses_are_read(tiny_data, tmp_path, monkeypatch, clip_norm):
    config = pico(
        tiny_data, 7, optim__clip_norm=clip_norm, evaluation__every_steps=3, checkpoint__every_steps=2
    )
    train(config, tmp_path, "at-once")
    monkeypatch.setattr(loop, "reads_late", lambda _: True)
    train(config, tmp_path, "late")
    timings = ("train_s", "tokens_per_s", "memory_mib")
    at_once, late = (
        [
            {key: value for key, value in line.items() if key not in timings}
            for line in trained(name, tmp_path)
        ]
        for name in ("at-once", "late")
    )
    assert late == at_once
    ours, expected = final_weights(tmp_path / "late"), final_weights(tmp_path / "at-once")
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_step_is_queued_before_the_one_before_it_is_read(tiny_data, tmp_path, monkeypatch, late):
    events = []
    before, read = Trainer._accumulate_gradients, Trainer._decide
    monkeypatch.setattr(
        Trainer,
        "_accumulate_gradients",
        lambda self: (events.append(("queue", self.progress.step + 1)), before(self))[1],
    )
    monkeypatch.setattr(
        Trainer,
        "_decide",
        lambda self, step: (events.append(("read", step.record["step"])), read(self, step))[1],
    )
    train(pico(tiny_data, 4, evaluation__every_steps=0), tmp_path, "run")
    assert events == [
        *(("queue", 1), ("queue", 2), ("read", 1), ("queue", 3), ("read", 2)),
        *(("queue", 4), ("read", 3), ("read", 4)),
    ]


def test_a_stop_is_heard_one_step_later_and_resume_is_bit_for_bit(tiny_data, tmp_path, monkeypatch, late):
    config = pico(tiny_data, 8)
    train(config, tmp_path, "whole")
    with monkeypatch.context() as patch:
        before_step(patch, 3, lambda _: os.kill(os.getpid(), signal.SIGINT))
        stopped = train(config, tmp_path, "parts")
    assert (stopped.status, stopped.summary["steps"]) == ("interrupted", 4)
    train(config, tmp_path, "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_lost_run_ends_one_step_later_and_saves_nothing_that_followed(
    tiny_data, tmp_path, monkeypatch, late
):
    before_step(monkeypatch, 4, lambda trainer: trainer.lap.model.head.weight.data.fill_(math.nan))
    config = pico(tiny_data, 8, checkpoint__every_steps=1, checkpoint__keep=9)
    with pytest.raises(DivergenceError, match="expected a finite loss; found nan at step 4"):
        train(config, tmp_path, "run")
    directory = RunDirectory(tmp_path / "run")
    summary = directory.read_summary()
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("diverged", 3, 3 * 2048)
    assert max(store.stored(directory.checkpoints)) == 3
    assert [line["step"] for line in trained("run", tmp_path)] == [1, 2, 3]


def status_of_rank(rank, world_size, data, root):
    """Only the last rank is asked to stop, before its third step."""
    from unittest.mock import patch

    from hotlap.distributed.process_group import Distributed
    from hotlap.distributed.signals import StopRequest
    from hotlap.runs.recorder import Recorder
    from hotlap.train.clock import Clock
    from hotlap.train.lap import build_lap
    from hotlap.train.snapshot import Snapshots, TrainingProgress

    distributed = Distributed(rank, rank, world_size, world_size, torch.device("cpu"), has_group=True)
    config = pico(data, 9, evaluation__every_steps=0)
    lap = build_lap(config, data, distributed, Clock())
    progress, stop = TrainingProgress(), StopRequest()
    original = Trainer._accumulate_gradients

    def accumulate(self):
        stop.requested = rank == world_size - 1 and self.progress.step == 2
        return original(self)

    with (
        patch.object(loop, "reads_late", lambda _: True),
        patch.object(Trainer, "_accumulate_gradients", accumulate),
    ):
        snapshots = Snapshots(None, config.checkpoint, progress)
        status = Trainer(lap, progress, Clock(), Recorder(), snapshots, stop).run()
    lap.data.loader.close()
    return status, progress.step


def test_all_ranks_hear_the_stop_of_one_after_the_same_step(tiny_data, tmp_path):
    assert run_ranks(status_of_rank, 2, tiny_data, tmp_path) == [("interrupted", 4)] * 2


def test_figures_on_the_host_need_no_copy():
    figures = torch.tensor([1.5, 0.0])
    assert Readback(figures).values() == [1.5, 0.0]
