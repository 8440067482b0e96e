import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from hotlap.attention.dense import DenseBackend
from hotlap.cli import dispatch
from hotlap.config import ModelConfig
from hotlap.distributed.leaving import leave_at_once
from hotlap.distributed.process_group import process_group
from hotlap.distributed.signals import StopRequest
from hotlap.errors import CheckpointError, ConfigError, DataError, DivergenceError, HotlapError, TrainingError
from hotlap.files import cache_directory
from hotlap.inference.generate import sample_text
from hotlap.kernels import choose_backend
from hotlap.model import Parts
from hotlap.model.layers import Matrix
from hotlap.recipes import RECIPES, resolve
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.runs.recorder import Recorder
from hotlap.settings import updated
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.clock import PHASES, Clock
from hotlap.train.evaluation import Evaluation, evaluate
from hotlap.train.lap import Lap, build_lap
from hotlap.train.loop import Trainer
from hotlap.train.masking import Masking
from hotlap.train.run import RunOptions, check_ranks, run
from hotlap.train.snapshot import Snapshots, TrainingProgress, restore
from tests.kernels_here import needs_kernels
from tests.trained_run import in_process
from tests.training import assert_one_curve, final_weights, losses, pico, train


def test_a_run_leaves_the_files_that_it_promises(tiny_data, tmp_path):
    result = train(pico(tiny_data, 4, evaluation__every_steps=2), tmp_path, "first")
    directory = RunDirectory.open(tmp_path / "first")
    assert result.status == "finished"
    assert directory.read_config() == result.lap.config
    summary = directory.read_summary()
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("finished", 4, 4 * 2048)
    assert summary["seconds"]["training"] > 0
    assert summary["seconds"]["validation"] > 0
    assert summary["peak_memory_mib"] > 0
    entries = directory.read_metrics().lines
    samples = [line for line in entries if line["kind"] == "sample"]
    assert [line["step"] for line in samples] == [2, 4]
    assert samples[1]["text"] in directory.samples_path.read_bytes().decode()
    lines = [line for line in entries if line["kind"] != "sample"]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("validation", 0),
        ("train", 1),
        ("train", 2),
        ("validation", 2),
        ("train", 3),
        ("train", 4),
        ("validation", 4),
    ]
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    assert lines[-1]["val_bpb"] > 0
    assert all(line["memory_mib"] > 0 for line in lines if line["kind"] == "train")
    environment = directory.read_environment()
    assert environment["attention_backend"] == choose_backend("auto", "cpu").name
    assert environment["data"]["train_tokens"] > 0
    assert len(environment["routing"]) == len(list(result.lap.model.parameters()))


def test_log_lines_are_those_the_field_knows(tiny_data, tmp_path):
    train(pico(tiny_data, 2), tmp_path, "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    pattern = r"^step:2/2 val_loss:\d+\.\d{4} train_time:\d+ms step_avg:\d+\.\d{2}ms$"
    assert re.search(pattern, log, flags=re.MULTILINE)


def test_the_header_says_what_could_happen_in_silence(tiny_data, tmp_path):
    train(pico(tiny_data, 1), tmp_path, "run")
    header = (tmp_path / "run" / "log.txt").read_text()
    for part in (
        f"{choose_backend('auto', 'cpu').name} backend; ",
        "float32 activations",
        "compile off",
        "dropped per epoch",
        "left out",
        "cpu",
        "checkpoint every 10 minutes, when validation improves and at the end",
        "optimizers ",
        " tensors, ",
        " epochs",
    ):
        assert part in header
    assert "in sequences of" not in header  # validation sequences are as long as those of training


class SwiGLU(nn.Module):
    """An MLP that the kernels do not know."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate, self.up = Matrix(config.width, 2 * config.width), Matrix(config.width, 2 * config.width)
        self.down = Matrix(2 * config.width, config.width, zero=True)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@needs_kernels
def test_a_foreign_mlp_trains_at_nano_with_everything_else_fused(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr("hotlap.train.ideas.Parts", partial(Parts, mlp=SwiGLU))
    data = {"data.source": str(tiny_data), "model.vocab_size": 512, "evaluation.tokens": 2048}
    quick = {"schedule.steps": 3, "schedule.warmup_steps": 0, "evaluation.every_steps": 3}
    config = updated(resolve("softcap", "nano"), {**data, **quick, "runtime.precision": "float32"})
    result = train(config, tmp_path, "run")
    header = (tmp_path / "run" / "log.txt").read_text()
    assert "MLP of layers 0-3 plain (SwiGLU has no kernel)" in header
    assert "attention, QKV of layers 0, 1, 3, loss, Newton-Schulz in C" in header
    kernels = result.directory.read_environment()["kernels"]
    assert kernels["MLP of layers 0-3"] == "plain: SwiGLU has no kernel"
    assert {type(block).__name__ for block in result.lap.model.blocks} == {"Block", "FusedBlock"}
    validations = [line for line in result.directory.read_metrics().lines if line["kind"] == "validation"]
    assert validations[-1]["val_loss"] < validations[0]["val_loss"]


@pytest.mark.parametrize("recipe", ["softcap", "window-warmup", "adamw"])
def test_resume_is_bit_for_bit(tiny_data, tmp_path, recipe):
    whole = pico(tiny_data, 6, recipe)
    train(whole, tmp_path, "whole")
    # The schedule is that of six steps from the start; the first process is stopped after three.
    stopped = train_until(whole, tmp_path, "parts", 3)
    assert stopped.status == "interrupted"
    train(whole, tmp_path, "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    ours, expected = final_weights(tmp_path / "parts"), final_weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def train_until(config, root: Path, name: str, step: int, resume: bool = False):
    """As a user would stop it: a signal that arrives while a step is computed."""
    original = Trainer._accumulate_gradients

    def signal_at_step(self):
        if self.progress.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_accumulate_gradients", signal_at_step)
        return train(config, root, name, resume)


def test_resume_drops_what_the_killed_process_wrote_after_its_checkpoint(tiny_data, tmp_path):
    config = pico(tiny_data, 5, checkpoint__every_steps=2, checkpoint__keep=5)
    train(config, tmp_path, "run")
    expected = losses(tmp_path / "run")
    # As if killed after step 3: the newest checkpoint is that of step 2.
    (tmp_path / "run" / "summary.json").unlink()
    for step in (4, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "train", "st')
    train(config, tmp_path, "run", resume=True)
    assert losses(tmp_path / "run") == expected
    resumed = [
        line for line in RunDirectory(tmp_path / "run").read_metrics().lines if line["kind"] == "resume"
    ]
    assert [line["step"] for line in resumed] == [2]


def test_a_checkpoint_knows_the_validation_of_its_step_and_the_best_one_is_kept(
    tiny_data, tmp_path, monkeypatch
):
    measured = iter([6.0, 5.0, 3.0, 4.0])  # at steps 0, 2, 4 and 6
    monkeypatch.setattr("hotlap.train.loop.validate", lambda *_: Evaluation(next(measured), None))
    config = pico(tiny_data, 6, evaluation__every_steps=2, checkpoint__every_steps=2, checkpoint__keep=1)
    train(config, tmp_path, "run")
    kept = store.stored(tmp_path / "run" / "checkpoints")
    assert {step: store.load(path).state["val_loss"] for step, path in kept.items()} == {4: 3.0, 6: 4.0}
    assert store.best(tmp_path / "run" / "checkpoints") == kept[4]


def test_going_on_from_a_validated_checkpoint_does_not_validate_it_again(tiny_data, tmp_path):
    config = pico(tiny_data, 4, evaluation__every_steps=2, checkpoint__every_steps=2)
    train(config, tmp_path, "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    train(config, tmp_path, "run", resume=True)
    lines = RunDirectory(tmp_path / "run").read_metrics().lines
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [0, 2, 4]


def test_a_stop_in_the_last_step_costs_neither_its_validation_nor_its_sample(tiny_data, tmp_path):
    config = pico(tiny_data, 8, evaluation__every_steps=3)
    train(config, tmp_path, "whole")
    stopped = train_until(config, tmp_path, "run", 8)
    assert (stopped.status, stopped.summary["steps"]) == ("interrupted", 8)
    for _ in range(2):
        assert train(config, tmp_path, "run", resume=True).status == "finished"
    whole, run = (RunDirectory(tmp_path / name).read_metrics().lines for name in ("whole", "run"))
    for kind in ("validation", "sample"):
        assert [line["step"] for line in run if line["kind"] == kind] == [
            line["step"] for line in whole if line["kind"] == kind
        ]
    assert whole[-1]["kind"] == "sample"
    last = store.load(store.latest(tmp_path / "run" / "checkpoints"))
    assert (last.step, last.state["progress"]["evaluated_step"]) == (8, 8)


def test_a_run_that_went_on_while_it_was_being_resumed_keeps_its_work(tiny_data, tmp_path):
    config = pico(tiny_data, 4, checkpoint__every_steps=2)
    train(config, tmp_path, "run")
    directory = RunDirectory(tmp_path / "run")
    read = store.load(directory.checkpoints / "step-000002")
    before = directory.metrics_path.read_bytes()
    options = RunOptions(tmp_path, "run", read, newest_step=2)
    with pytest.raises(CheckpointError, match=r"found step 4.*resume again"):
        run(config, options, Console(file=io.StringIO()))
    assert directory.metrics_path.read_bytes() == before
    assert directory.read_summary()["status"] == "finished"
    assert [*store.stored(directory.checkpoints)] == [2, 4]


def test_killed_while_it_goes_back_a_run_has_the_lines_of_its_newest_checkpoint(
    tiny_data, tmp_path, monkeypatch
):
    config = pico(tiny_data, 4, checkpoint__every_steps=2)
    train(config, tmp_path, "run")
    expected = losses(tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    earlier = RunOptions(tmp_path, "run", store.load(directory.checkpoints / "step-000002"))

    def killed(*_):
        raise KeyboardInterrupt

    for step in (RunDirectory, "rewind"), (store, "discard_after"):
        with monkeypatch.context() as patch:
            patch.setattr(*step, killed)
            with pytest.raises(KeyboardInterrupt):
                run(config, earlier, Console(file=io.StringIO()))
        newest = max(store.stored(directory.checkpoints))
        assert max(line["step"] for line in directory.read_metrics().lines) >= newest
    train(config, tmp_path, "run", resume=True)
    assert losses(tmp_path / "run") == expected


def test_a_run_that_ended_at_its_target_ends_again_when_resumed(tiny_data, tmp_path):
    config = pico(tiny_data, 50, evaluation__every_steps=2, evaluation__target_loss=5.9)
    first = train(config, tmp_path, "run")
    again = train(config, tmp_path, "run", resume=True)
    assert again.status == first.status == "target"
    assert again.summary["steps"] == first.summary["steps"]


@pytest.mark.parametrize("micro_sequences", [2, 4])
def test_micro_batches_do_not_change_a_step(tiny_data, tmp_path, micro_sequences):
    train(pico(tiny_data, 6), tmp_path, "one")
    train(pico(tiny_data, 6, batch__micro_sequences=micro_sequences), tmp_path, "more")
    assert_one_curve(losses(tmp_path / "more"), losses(tmp_path / "one"))


def test_seeds_give_different_runs_and_the_same_seed_the_same(tiny_data, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(pico(tiny_data, 3, seed=seed), tmp_path, name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_a_target_stops_the_run_and_is_reported(tiny_data, tmp_path):
    settings = {"evaluation__every_steps": 2, "evaluation__target_loss": 5.9}
    result = train(pico(tiny_data, 50, **settings), tmp_path, "run")
    assert result.status == "target"
    assert 0 < result.summary["steps"] < 50
    target = result.summary["target"]
    assert (target["kind"], target["reached"], target["step"]) == ("loss", True, result.summary["steps"])
    assert result.summary["val_loss"] <= 5.9
    onward = pico(tiny_data, 20, **settings, evaluation__stop_at_target=False)
    beyond = train(onward, tmp_path, "beyond")
    assert (beyond.status, beyond.summary["steps"]) == ("finished", 20)
    # The first validation at the target is the same, wherever the run ends.
    assert (beyond.summary["target"]["reached"], beyond.summary["target"]["step"]) == (True, target["step"])
    missed = train(pico(tiny_data, 2, evaluation__target_bpb=0.01), tmp_path, "missed")
    assert (missed.status, missed.summary["target"]["reached"]) == ("finished", False)


def test_a_loss_that_is_not_finite_stops_the_run_with_what_to_try(tiny_data, tmp_path):
    config = pico(tiny_data, 8, optim__adam__head_lr=1e38, checkpoint__every_steps=1)
    with pytest.raises(TrainingError) as caught:
        train(config, tmp_path, "run")
    assert RunDirectory(tmp_path / "run").read_summary()["status"] == "diverged"
    message = str(caught.value)
    assert re.search(r"found (nan|inf) at step \d", message)
    assert "--on-nan skip" in message
    assert "checkpoints/step-" in message


def test_a_step_that_is_not_finite_can_be_skipped_and_is_counted(tiny_data, tmp_path, monkeypatch):
    original = Trainer._accumulate_gradients
    weights = {}

    def broken_at_the_second_step(self):
        weights[self.progress.step] = self.lap.model.head.weight.detach().clone()
        loss = original(self)
        return loss * float("nan") if self.progress.step == 1 else loss

    monkeypatch.setattr(Trainer, "_accumulate_gradients", broken_at_the_second_step)
    result = train(pico(tiny_data, 4, runtime__on_nan="skip"), tmp_path, "run")
    assert (result.status, result.summary["nan_steps"], result.summary["steps"]) == ("finished", 1, 4)
    assert losses(tmp_path / "run")[1] is None
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_a_gradient_norm_that_is_not_finite_counts_as_a_loss_that_is_not(
    tiny_data, tmp_path, monkeypatch, on_nan
):
    original = Trainer._accumulate_gradients
    weights = {}

    def overflows_at_the_second_step(self):
        weights[self.progress.step] = self.lap.model.head.weight.detach().clone()
        loss = original(self)
        if self.progress.step == 1:
            self.lap.model.head.weight.grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(Trainer, "_accumulate_gradients", overflows_at_the_second_step)
    config = pico(tiny_data, 4, optim__clip_norm=1.0, runtime__on_nan=on_nan)
    if on_nan == "stop":
        with pytest.raises(DivergenceError, match="expected a finite gradient norm; found inf at step 2"):
            train(config, tmp_path, "run")
        return
    result = train(config, tmp_path, "run")
    assert (result.status, result.summary["nan_steps"]) == ("finished", 1)
    assert torch.equal(weights[1], weights[2])
    assert weights[3].isfinite().all()
    assert not torch.equal(weights[2], weights[3])


def test_a_model_that_is_lost_ends_without_a_sample_and_keeps_its_last_good_checkpoint(
    tiny_data, tmp_path, monkeypatch
):
    original = Trainer._accumulate_gradients

    def lost_at_the_third_step(self):
        if self.progress.step == 2:
            self.lap.model.head.weight.data.fill_(math.nan)
        return original(self)

    monkeypatch.setattr(Trainer, "_accumulate_gradients", lost_at_the_third_step)
    config = pico(tiny_data, 8, runtime__on_nan="skip", checkpoint__every_steps=1, evaluation__every_steps=2)
    result = train(config, tmp_path, "run")
    assert (result.status, result.summary["nan_steps"]) == ("finished", 6)
    assert math.isnan(result.summary["val_loss"])
    directory = RunDirectory(tmp_path / "run")
    assert [line["step"] for line in directory.read_metrics().lines if line["kind"] == "sample"] == [2]
    assert 2 in store.stored(directory.checkpoints)
    with pytest.raises(CheckpointError, match="finite logits"):
        sample_text(result.lap.model, config, result.lap.data.tokenizer, 8)


def test_clipping_is_measured(tiny_data, tmp_path):
    train(pico(tiny_data, 2, "window-warmup"), tmp_path, "run")
    lines = RunDirectory(tmp_path / "run").read_metrics().lines
    assert all(line["grad_norm"] > 0 for line in lines if line["kind"] == "train")


def test_the_window_follows_the_schedule_in_training_and_validation(tiny_data, tmp_path):
    train(pico(tiny_data, 6, evaluation__every_steps=3), tmp_path, "run")
    lines = RunDirectory(tmp_path / "run").read_metrics().lines
    windows = {(line["kind"], line["step"]): line["window"] for line in lines if "window" in line}
    # 128 + 192·x tokens, rounded down to blocks of 128; update s uses x = (s − 1)/6.
    assert [windows["train", step] for step in range(1, 7)] == [128, 128, 128, 128, 256, 256]
    assert [windows["validation", step] for step in (0, 3, 6)] == [128, 128, 256]


class ValidatingAgain(Recorder):
    """Repeats each validation with the dense reference, with the window of its step and of the one before."""

    def __init__(self, lap: Lap) -> None:
        self.lap = lap
        self.losses: list[tuple[float, float, float]] = []

    def validated(self, record):
        masking = Masking(self.lap.config, DenseBackend(), self.lap.data.end_of_text, torch.device("cpu"))
        again = []
        for step in (record["step"], max(0, record["step"] - 1)):
            masking.set_step(step)
            again.append(evaluate(BatchLoss(self.lap.model, masking), self.lap.data.validation, None).loss)
        self.losses.append((record["val_loss"], *again))


def test_a_validation_sees_the_window_of_its_step(tiny_data):
    # 64 + 192·x tokens: each of the three steps has a window of its own.
    config = pico(tiny_data, 3, "window-warmup", evaluation__every_steps=1)
    with process_group("cpu") as alone:
        lap = build_lap(config, tiny_data, alone, Clock())
    for parameter in lap.model.parameters():
        if not parameter.any():  # as built, attention would contribute nothing
            nn.init.normal_(parameter, std=0.1)
    recorder, start = ValidatingAgain(lap), TrainingProgress()
    snapshots = Snapshots(None, config.checkpoint, start)
    Trainer(lap, start, Clock(), recorder, snapshots, StopRequest()).run()
    lap.data.loader.close()
    assert len(recorder.losses) == 4
    for step, (recorded, with_its_window, with_the_one_before) in enumerate(recorder.losses):
        assert recorded == pytest.approx(with_its_window, rel=1e-6)
        assert step == 0 or recorded != pytest.approx(with_the_one_before, rel=1e-5)


@pytest.mark.parametrize(("recipe", "tokens"), [("softcap", 1024), ("softcap", 128), ("adamw", 256)])
def test_validation_sequences_may_be_longer_or_shorter_than_those_of_training(
    tiny_data, tmp_path, capsys, recipe, tokens
):
    changes = {"evaluation__tokens": 2048, "evaluation__validation_sequence_tokens": tokens}
    result = train(pico(tiny_data, 2, recipe, **changes), tmp_path, "run")
    validation = result.lap.data.validation
    assert [batch.inputs.shape[1] for batch in validation] == [tokens] * (2048 // tokens)
    assert f"2,048 tokens in sequences of {tokens:,}," in (tmp_path / "run" / "log.txt").read_text()
    # The command reads the run's configuration, and builds the model anew.
    command = ["eval", str(tmp_path / "run"), "--device", "cpu", "--tokens", "2048", "--json"]
    (evaluated,) = json.loads(in_process(capsys, *command).stdout)["sources"]
    assert evaluated["loss"] == pytest.approx(result.summary["val_loss"], rel=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(tiny_data, tmp_path, recipe):
    train(pico(tiny_data, 8, recipe), tmp_path, "run")
    curve = losses(tmp_path / "run")
    assert curve[-1] < curve[0] - 0.3


def test_the_clock_counts_each_second_once(monkeypatch):
    now = 100.0
    monkeypatch.setattr("hotlap.train.clock.time.perf_counter", lambda: now)

    clock = Clock()
    now += 1
    with clock.phase("compile"):
        now += 2
    now += 4
    clock.switch("training")
    now += 8
    with clock.phase("validation"):
        now += 16
        assert clock.training_s == 8
        with clock.phase("saving"):
            now += 32
        now += 64
    now += 128
    assert clock.training_s == 8 + 128
    clock.switch("setup")
    assert clock.seconds == {
        "setup": 1 + 4,
        "compile": 2,
        "training": 8 + 128,
        "validation": 16 + 64,
        "saving": 32,
    }
    assert sum(clock.seconds.values()) == now - 100


@pytest.mark.parametrize(
    "changes, error, part",
    [
        ({"data__source": "nowhere"}, DataError, "data.source = nowhere"),
        ({"model__vocab_size": 256}, DataError, "512"),
        ({"runtime__device": "mps"}, HotlapError, "found mps"),
        ({"attention__backend": "flex"}, HotlapError, "CUDA"),
        ({"batch__tokens_per_step": 512 * 4096, "data__order": "stream"}, DataError, "tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(tiny_data, tmp_path, changes, error, part):
    with pytest.raises(error, match=part):
        train(pico(tiny_data, 2, **changes), tmp_path / "runs", "run")
    assert not (tmp_path / "runs").exists()


def test_a_name_that_exists_is_refused(tiny_data, tmp_path):
    train(pico(tiny_data, 1), tmp_path, "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="`run`, which exists"):
        train(pico(tiny_data, 1), tmp_path, "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_other_data_than_the_run_was_started_with_is_refused(tiny_data, tmp_path):
    config = pico(tiny_data, 2)
    train(config, tmp_path, "run")
    checkpoint = store.load(tmp_path / "run" / "checkpoints" / "step-000002")
    with process_group("cpu") as distributed:
        lap = build_lap(config, tiny_data, distributed, Clock())
        for key, split in (("data", "training"), ("validation_data", "validation")):
            assert checkpoint.state[key]
            other = dataclasses.replace(checkpoint, state={**checkpoint.state, key: "other"})
            with pytest.raises(CheckpointError, match=f"other {split} shards"):
                restore(lap, other)
        # As it was written before the validation split's fingerprint was kept.
        older = {key: value for key, value in checkpoint.state.items() if key != "validation_data"}
        assert restore(lap, dataclasses.replace(checkpoint, state=older)).step == 2


def test_no_file_of_a_run_names_the_users_home(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(cache_directory()))
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(tiny_data, tmp_path / "data")
    for steps, resumes in ((1, False), (2, True)):
        train(pico(tmp_path / "data", steps), tmp_path / "runs", "run", resume=resumes)
    texts = [path for path in (tmp_path / "runs").rglob("*.*") if path.suffix in (".json", ".jsonl", ".txt")]
    assert {path.name for path in texts} >= {"config.json", "log.txt", "state.json", "environment.json"}
    assert not [path for path in texts if str(tmp_path) in path.read_text()]
    assert '"~/data"' in (tmp_path / "runs" / "run" / "config.json").read_text()


def test_a_corpus_is_prepared_before_processes_start_that_would_wait_for_it(tmp_path, monkeypatch):
    done = []
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path))
    monkeypatch.setattr("hotlap.corpus.configured.ensure_prepared", lambda name, *_, **__: done.append(name))
    monkeypatch.setattr("hotlap.distributed.launch.launch", lambda procs, _: done.append(procs) or 0)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit, match=r"^0$"):
        dispatch(["train", "softcap", "--size", "pico", "--procs", "2", "--data.source", "sotu"])
    assert done == ["sotu", 2]


@pytest.mark.parametrize(
    "given, resumed",
    [
        (
            ["--resume", "--steps", "4", "--allow-change"],
            ["--steps", "4", "--allow-change", "--resume={run}"],
        ),
        (["--resume", "{run}"], ["--resume", "{run}"]),
    ],
)
def test_ranks_are_given_the_run_that_the_launcher_found(tiny_data, tmp_path, monkeypatch, given, resumed):
    train(pico(tiny_data, 2), tmp_path / "runs", "newest")
    run = tmp_path / "runs" / "newest"
    (run / "summary.json").unlink()  # as if it had been killed
    launched = []
    monkeypatch.setattr("hotlap.distributed.launch.launch", lambda _, words: launched.append(words) or 0)
    monkeypatch.setattr("os._exit", sys.exit)
    runs = ["--runs", str(run.parent)]
    with pytest.raises(SystemExit, match=r"^0$"):
        dispatch(["train", *runs, "--procs", "2", *(word.format(run=run) for word in given)])
    assert launched == [["train", *runs, *(word.format(run=run) for word in resumed)]]


class GoneReader(io.StringIO):
    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize(
    "error, code, said",
    [
        (RuntimeError("connection closed by peer"), 1, "RuntimeError: connection closed by peer"),
        (ArithmeticError(), 1, "ArithmeticError"),
        (MemoryError(), 2, "or use a smaller --size, vocabulary or batch.micro_sequences"),
        (KeyboardInterrupt(), 130, ""),
        (ConfigError(expected="a", found="b", do="c"), 2, "hotlap: expected a; found b; c"),
    ],
)
def test_a_rank_leaves_at_once_whatever_ends_it(tiny_data, tmp_path, monkeypatch, capsys, error, code, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("HOTLAP_FAILURE_FILE", raising=False)
    monkeypatch.setattr("hotlap.commands.train.train_here", fail)
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("hotlap.distributed.leaving._leaving", threading.Lock())  # this process stays
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^{code}$"):
        dispatch(["train", "softcap", "--size", "pico", "--data.source", str(tiny_data)])
    assert capsys.readouterr().err.strip().endswith(said)


def test_a_reader_that_is_gone_does_not_keep_a_rank_from_leaving(monkeypatch):
    monkeypatch.setattr("sys.stdout", GoneReader())
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit, match=r"^3$"):
        leave_at_once(3)


def test_ranks_that_do_not_divide_a_step_are_refused_before_anything_starts(tiny_data):
    config = pico(tiny_data, 1)
    check_ranks(config, 4)
    with pytest.raises(ConfigError, match=r"found 3 processes; use one of \[1, 2, 4\]"):
        check_ranks(config, 3)
    with pytest.raises(ConfigError, match="found 8 processes"):
        check_ranks(updated(config, {"seed": 1}), 8)


def test_a_resumed_run_counts_the_seconds_of_all_its_processes(tiny_data, tmp_path):
    config = pico(tiny_data, 4)
    train_until(config, tmp_path, "run", 2)
    saved = store.load_latest(tmp_path / "run" / "checkpoints")[0]
    assert set(saved.state["progress"]["other_s"]) == set(PHASES) - {"training"}
    assert saved.state["progress"]["other_s"]["setup"] > 0
    earlier = {"setup": 1e4, "compile": 2e4, "validation": 3e4, "saving": 4e4}
    saved.state["progress"] |= {"other_s": earlier, "training_s": 5e4}
    result = run(config, RunOptions(tmp_path, "run", saved), Console(file=io.StringIO()))
    seconds = result.summary["seconds"]
    for phase, before in {**earlier, "training": 5e4}.items():
        assert before <= seconds[phase] < before + 1e3, phase
    assert seconds["total"] == pytest.approx(sum(seconds[phase] for phase in PHASES))


def test_a_checkpoint_from_before_phases_were_kept_is_gone_on_from(tiny_data, tmp_path):
    config = pico(tiny_data, 4)
    train_until(config, tmp_path, "run", 2)
    saved = store.load_latest(tmp_path / "run" / "checkpoints")[0]
    del saved.state["progress"]["other_s"]
    result = run(config, RunOptions(tmp_path, "run", saved), Console(file=io.StringIO()))
    assert result.status == "finished"


def test_a_resumed_run_keeps_the_environment_that_it_was_started_in(tiny_data, tmp_path):
    config = pico(tiny_data, 6)
    train_until(config, tmp_path, "run", 2)
    directory = RunDirectory(tmp_path / "run")
    first = directory.read_environment()
    train_until(config, tmp_path, "run", 4, resume=True)
    train(config, tmp_path, "run", resume=True)
    last = directory.read_environment()
    assert "earlier" not in first
    assert last["earlier"][0] == first
    assert len(last["earlier"]) == 2
    assert last["data"] == first["data"]


def test_a_save_is_due_by_the_clock_too(tiny_data, tmp_path):
    often = {"checkpoint__every_minutes": 1e-9, "checkpoint__every_steps": 0, "checkpoint__keep": 9}
    train(pico(tiny_data, 3, **often), tmp_path, "often")
    assert list(store.stored(tmp_path / "often" / "checkpoints")) == [1, 2, 3]
    train(pico(tiny_data, 3, **{**often, "checkpoint__every_minutes": 0}), tmp_path, "never")
    assert list(store.stored(tmp_path / "never" / "checkpoints")) == [3]
    for ranks, saved in ((1, [3]), (2, [1, 2, 3])):
        config = pico(tiny_data, 3, **often, checkpoint__end_only_from_ranks=ranks)
        train(config, tmp_path, f"end-only-from-{ranks}")
        assert list(store.stored(tmp_path / f"end-only-from-{ranks}" / "checkpoints")) == saved
