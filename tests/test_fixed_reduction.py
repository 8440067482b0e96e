"""`runtime.reduction = fixed`: the same bits on any number of ranks and threads."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch

from hotlap.distributed.fixed_sum import sum_over_ranks, tree_sum
from hotlap.distributed.process_group import Distributed
from hotlap.distributed.signals import StopRequest
from hotlap.errors import ConfigError, DeviceError
from hotlap.optim.muon_math import OneByOne, PlainMath, UpdateRule
from hotlap.optim.newton_schulz import step_coefficients
from hotlap.runs import checkpoint as store
from hotlap.runs.recorder import Recorder
from hotlap.settings import updated
from hotlap.train.clock import Clock
from hotlap.train.evaluation import evaluate
from hotlap.train.header import header_lines
from hotlap.train.lap import build_lap
from hotlap.train.loop import Trainer
from hotlap.train.run import check_ranks, check_reduction
from hotlap.train.snapshot import Snapshots, TrainingProgress
from hotlap.train.workers import Workers
from tests.command import complaint, hotlap, hotlap_here
from tests.ranks import run_ranks
from tests.training import command, pico

CPU = torch.device("cpu")
LENGTH = 37  # which no number of ranks divides


def vectors(count):
    """Whose sum depends on the order."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(count, LENGTH, generator=generator))


def summed(tensors):
    return tree_sum((x.clone() for x in tensors), len(tensors))


def test_halves_are_summed_on_their_own_and_what_is_odd_in_order():
    a, b, c, d, e, f = vectors(6)
    assert summed([a]).equal(a)
    assert summed([a, b, c, d]).equal((a + b) + (c + d))
    assert summed([a, b, c, d, e, f]).equal(((a + b) + c) + ((d + e) + f))
    assert not summed([a, b, c, d]).equal(((a + b) + c) + d)


@pytest.mark.parametrize("count, parts", [(8, 2), (8, 4), (8, 8), (6, 2), (12, 4)])
def test_equal_parts_are_subtrees(count, parts):
    all_vectors = vectors(count)
    size = count // parts
    of_parts = [summed(all_vectors[start : start + size]) for start in range(0, count, size)]
    assert summed(of_parts).equal(summed(all_vectors))


def sums_own(rank, world_size):
    own = vectors(world_size)[rank]
    return sum_over_ranks(own)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_sum_in_the_order_of_one_process(world_size):
    expected = summed(vectors(world_size))
    assert all(found.equal(expected) for found in run_ranks(sums_own, world_size))


def test_workers_return_in_order_and_run_ahead_no_further_than_their_number():
    workers, started = Workers(2), []
    second_may_end = threading.Event()

    def work(item):
        started.append(item)
        if item == 0:
            assert second_may_end.wait(timeout=30), "both items run at once"
        second_may_end.set()
        return item, torch.get_num_threads()

    results = workers.map(work, range(5))
    assert next(results) == (0, 1)
    assert sorted(started) == [0, 1]
    assert list(results) == [(item, 1) for item in range(1, 5)]
    with pytest.raises(ZeroDivisionError):
        list(workers.map(lambda item: 1 / item, [1, 0]))
    workers.close()


def test_a_matrix_is_orthogonalized_alike_whatever_is_beside_it():
    rule = UpdateRule("lerp", True, step_coefficients("quintic", 5))
    gradients = list(torch.randn(5, 96, 96, generator=torch.Generator().manual_seed(0)))
    math = OneByOne(PlainMath())

    def updates(of):
        momentum = torch.zeros(len(of), 96, 96)
        return math.compute_updates(of, momentum, 0.9, rule, 1, torch.float32)

    together = updates(gradients)
    for gradient, update in zip(gradients, together, strict=True):
        assert updates([gradient])[0].equal(update)


def trains(rank, world_size, data, threads, sequence_tokens):
    """The losses of three steps, the weights, the momentum that is here, and the validation after them."""
    torch.set_num_threads(threads)
    config = pico(
        data, 3, batch__sequence_tokens=sequence_tokens, runtime__reduction="fixed", optim__clip_norm=1.0
    )
    distributed = Distributed(rank, rank, world_size, world_size, CPU, has_group=world_size > 1)
    lap = build_lap(config, data, distributed, Clock())
    losses = []

    class Losses(Recorder):
        def trained(self, metrics):
            losses.append((metrics["loss"], metrics["grad_norm"]))

    progress = TrainingProgress()
    snapshots = Snapshots(None, config.checkpoint, progress)
    trainer = Trainer(lap, progress, Clock(), Losses(), snapshots, StopRequest())
    for _ in range(3):
        trainer.update()
    validation = evaluate(lap.batch_loss, lap.data.validation, None, lap.workers.map).loss
    lap.workers.close()
    return losses, validation, {name: x.detach().clone() for name, x in lap.model.named_parameters()}


@pytest.mark.parametrize("sequence_tokens", [512, 256])
def test_two_ranks_train_to_the_bits_of_one_on_any_number_of_threads(tiny_data, sequence_tokens):
    losses, validation, weights = trains(0, 1, tiny_data, 1, sequence_tokens)
    others = [trains(0, 1, tiny_data, 3, sequence_tokens)]
    others += run_ranks(trains, 2, tiny_data, 2, sequence_tokens)
    for other_losses, other_validation, other_weights in others:
        assert other_losses == losses
        assert other_validation == validation
        assert all(other_weights[name].equal(weight) for name, weight in weights.items())


def test_a_fixed_reduction_trains_as_an_averaged_one(tiny_data):
    """The same sums in another order."""
    config = pico(tiny_data, 1)
    lap = build_lap(config, tiny_data, Distributed(0, 0, 1, 1, CPU, has_group=False), Clock())
    progress = TrainingProgress()
    snapshots = Snapshots(None, config.checkpoint, progress)
    trainer = Trainer(lap, progress, Clock(), Recorder(), snapshots, StopRequest())
    loss = trainer._accumulate_gradients()
    expected = [parameter.grad.clone() for parameter in trainer.parameters]
    fixed = build_lap(updated(config, {"runtime.reduction": "fixed"}), tiny_data, lap.distributed, Clock())
    trainer = Trainer(fixed, progress, Clock(), Recorder(), snapshots, StopRequest())
    torch.testing.assert_close(trainer._accumulate_gradients(), loss)
    for parameter, gradient in zip(trainer.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)
    assert any("the same bits" in line for line in header_lines(fixed, progress, Path()))
    assert not any("the same bits" in line for line in header_lines(lap, progress, Path()))
    fixed.workers.close()


def test_what_cannot_hold_is_refused(tiny_data):
    config = pico(tiny_data, 1, batch__sequence_tokens=256, batch__tokens_per_step=1536)
    fixed = updated(config, {"runtime.reduction": "fixed"})
    check_ranks(fixed, 3)
    check_reduction(config, CPU, 3)
    check_reduction(fixed, CPU, 4)
    with pytest.raises(ConfigError, match=r"power of two of processes.*; found 3 processes"):
        check_reduction(fixed, CPU, 3)
    with pytest.raises(DeviceError, match=r"expected device cpu .*; found cuda"):
        check_reduction(fixed, torch.device("cuda"), 1)
    with pytest.raises(ConfigError, match=r"found 2; add --micro-sequences 1"):
        updated(fixed, {"batch.micro_sequences": 2})
    with pytest.raises(ConfigError, match=r"compile off with .*; found block"):
        updated(fixed, {"runtime.compile": "block"})


def test_the_command_refuses_before_ranks_start(tiny_data, tmp_path):
    words = command(tiny_data, 1, "--batch.sequence-tokens", "256", "--batch.tokens-per-step", "1536")
    refused = hotlap_here(*words, "--reduction", "fixed", "--procs", "3", cwd=tmp_path)
    assert "found 3 processes" in complaint(refused)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["float32", "auto"])
@pytest.mark.parametrize("size", ["pico", "nano"])
def test_files_of_final_weights_are_equal(tmp_path, size, precision):
    """On 1, 2 and 4 ranks with 1, 2 and 3 threads each, after 30 steps of four sequences."""
    words = ["train", "softcap", "--size", size, "--steps", "30", "--batch.sequence-tokens", "512"]
    words += ["--evaluation.tokens", "4096", "--precision", precision, "--reduction", "fixed"]
    files = set()
    for ranks, threads in itertools.product((1, 2, 4), (1, 2, 3)):
        name = f"{ranks}-{threads}"
        procs = ["--procs", str(ranks)] if ranks > 1 else []
        done = hotlap(*words, *procs, "--threads", str(threads), "--name", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        newest = store.latest(tmp_path / "runs" / name / "checkpoints")
        files.add(tuple((newest / f"{part}.safetensors").read_bytes() for part in ("model", "optimizer")))
    assert len(files) == 1
