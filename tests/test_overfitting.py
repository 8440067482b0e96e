"""A run whose validation falls and then rises: what is kept, told, and used afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hotlap.inference.load import load
from hotlap.report.figures import focused_range
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.runs.reader import load_run
from hotlap.terminal import printable
from hotlap.train import loop
from hotlap.train.evaluation import Evaluation, evaluate
from tests.command import hotlap_here
from tests.training import command, pico, train

# By step; the best is at 3, and from 4 on they are above it by more than noise.
LOSSES = [8.0, 6.0, 5.0, 4.0, 4.5, 4.6, 4.7, 4.8]
BEST = 3


@pytest.fixture
def rising(monkeypatch):
    """Validations that give LOSSES, whatever the model."""
    real = loop.Trainer._validate

    def scripted(trainer: loop.Trainer) -> None:
        found = Evaluation(LOSSES[trainer.progress.step], LOSSES[trainer.progress.step] / 2, 1024)
        monkeypatch.setattr(loop, "validate", lambda *_: found)
        real(trainer)

    monkeypatch.setattr(loop.Trainer, "_validate", scripted)


def rising_config(data: Path, **changes):
    return pico(data, len(LOSSES) - 1, evaluation__every_steps=1, **{"checkpoint__keep": 1, **changes})


def steps_kept(run_directory: Path) -> list[int]:
    return list(store.stored(run_directory / "checkpoints"))


def test_the_best_of_all_validations_is_kept_and_used(tiny_data, tmp_path, rising):
    result = train(rising_config(tiny_data), tmp_path, "run")
    assert steps_kept(tmp_path / "run") == [BEST, 7]
    assert result.summary["best"] == {"step": BEST, "loss": 4.0, "bpb": 2.0}
    assert (load(tmp_path / "run").step, load(tmp_path / "run", checkpoint="latest").step) == (BEST, 7)
    exported = hotlap_here("export", str(tmp_path / "run"), str(tmp_path / "exported"))
    assert f"exported step {BEST}, the best of its run" in exported.stdout
    sampled = hotlap_here("sample", str(tmp_path / "run"), "--tokens", "3")
    assert f"step {BEST}, the best of its run" in sampled.stderr


def test_a_rise_is_told_once_on_screen_in_the_log_and_in_the_report(tiny_data, tmp_path, rising):
    train(rising_config(tiny_data), tmp_path, "run")
    said = [
        line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "above its best" in line
    ]
    assert len(said) == 1
    assert said[0].startswith("step:6/7 validation is 18% above its best, of step 3")
    found = load_run(tmp_path / "run")
    assert [note for note in found.notes if "above its best" in note] == [said[0].removeprefix("step:6/7 ")]
    assert found.best == BEST


def test_the_loss_figure_shows_a_validation_that_rises_and_leaves_out_a_spike():
    steps = np.arange(100.0)
    falling, rising = 8 / (1 + steps), 3 + steps / 25
    spiked = falling.copy()
    spiked[60] = 50
    bottom, top = focused_range([(steps, spiked, spiked)], None)
    assert bottom < 8 / 100
    assert top < 1.5
    _, top = focused_range([(steps, falling, falling), (steps, rising, rising)], None)
    assert rising[-1] < top < 8


@pytest.mark.parametrize("killed_after", [2, 3, 4, 6])
def test_killed_and_resumed_the_best_is_the_same_bit_for_bit(tiny_data, tmp_path, rising, killed_after):
    train(rising_config(tiny_data), tmp_path, "whole")
    config = rising_config(tiny_data)
    updates = loop.Trainer.update

    def update(trainer):
        if trainer.progress.step == killed_after:
            raise KeyboardInterrupt
        updates(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "update", update)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path, "killed")
    assert max(steps_kept(tmp_path / "killed")) == min(killed_after, BEST)
    train(config, tmp_path, "killed", resume=True)
    whole, resumed = (store.load(store.best(tmp_path / name / "checkpoints")) for name in ("whole", "killed"))
    assert whole.step == resumed.step == BEST
    for group in whole.tensors:
        for name, tensor in whole.tensors[group].items():
            assert torch.equal(tensor, resumed.tensors[group][name]), name
    for name in ("whole", "killed"):
        assert (tmp_path / name / "log.txt").read_text().count("above its best") == 1


def test_patience_ends_the_run_with_a_result_and_resuming_finds_it_over(tiny_data, tmp_path, rising):
    config = rising_config(tiny_data, evaluation__patience=2)
    result = train(config, tmp_path, "run")
    assert (result.status, result.summary["steps"]) == ("patience", BEST + 2)
    assert load_run(tmp_path / "run").is_final
    again = hotlap_here("train", "--resume", str(tmp_path / "run"))
    assert "is over: step 5 of 7" in again.stdout
    saved = store.load_latest(tmp_path / "run" / "checkpoints")[0]
    assert train(config, tmp_path, "run", resume=True).status == "patience"
    assert (
        store.load_latest(tmp_path / "run" / "checkpoints")[0].state["progress"]["trend"]
        == (saved.state["progress"]["trend"])
    )


def test_as_a_record_on_many_ranks_nothing_is_saved_when_validation_improves(tiny_data, tmp_path, rising):
    train(rising_config(tiny_data, checkpoint__end_only_from_ranks=1), tmp_path, "run")
    assert steps_kept(tmp_path / "run") == [7]
    train(rising_config(tiny_data, checkpoint__keep_best=False), tmp_path, "other")
    assert steps_kept(tmp_path / "other") == [7]


def test_large_weights_are_saved_only_as_often_as_saving_takes_little_time(
    tiny_data, tmp_path, rising, monkeypatch
):
    monkeypatch.setattr("hotlap.train.snapshot.SMALL_BYTES", 0)
    monkeypatch.setattr("hotlap.train.snapshot.MOST_SAVING_FRACTION", 0.0)
    train(rising_config(tiny_data), tmp_path, "run")
    # The first, whose time is not known before, made room for the last, which is better.
    assert steps_kept(tmp_path / "run") == [7]
    monkeypatch.setattr("hotlap.train.snapshot.MOST_SAVING_FRACTION", 1e9)
    train(rising_config(tiny_data), tmp_path, "often")
    assert steps_kept(tmp_path / "often") == [BEST, 7]


def test_the_end_of_a_lap_shows_the_best_step_and_its_sample(tiny_data, tmp_path, rising, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = command(tiny_data, 7, "--evaluation.every-steps", "1", "--name", "lap", "--device", "cpu")
    shown = hotlap_here(*words).stdout
    assert "step 3: loss 4.0000, bits per byte 2.0000" in shown
    assert "sample of step 3, the best" in shown
    assert "play runs/lap" in shown
    assert shown.count("above its best") == 1
    text = shown.split("sample of step 3, the best\n")[1]
    best = load(tmp_path / "runs" / "lap", device="cpu").generate()[0]
    assert text.startswith(printable(best, lines=True))


def shared_config(data: Path, **changes):
    """A fifth of 4 steps of 2048 tokens, over the validations at steps 0 and 2: 768 of 2048 tokens each."""
    return pico(
        data,
        4,
        batch__sequence_tokens=256,
        data__chunk_tokens=256,
        evaluation__every_steps=2,
        evaluation__tokens=2048,
        evaluation__share=0.2,
        **changes,
    )


def validations(run_directory: Path) -> list[dict]:
    return [line for line in RunDirectory(run_directory).read_metrics().lines if line["kind"] == "validation"]


def test_validations_on_the_way_take_their_share_and_the_last_takes_all(tiny_data, tmp_path):
    lap = train(shared_config(tiny_data), tmp_path, "run").lap
    parts = lap.data.validation_parts
    assert (parts.common.tokens, parts.rest.tokens) == (768, 1280)
    assert "768 of them before the end" in (tmp_path / "run" / "log.txt").read_text()
    first, second, last = validations(tmp_path / "run")
    assert [line["val_tokens"] for line in (first, second, last)] == [768, 768, 2048]
    assert second["comparable_loss"] == second["val_loss"]
    common = evaluate(lap.batch_loss, parts.common, None).loss
    assert last["comparable_loss"] == common != last["val_loss"]
    assert last["val_loss"] == pytest.approx(
        evaluate(lap.batch_loss, lap.data.validation, None).loss, abs=1e-6
    )


@pytest.mark.parametrize(
    ("common", "rest", "status", "tokens"),
    [
        (3.0, 4.0, "finished", [2048, 2048, 2048]),  # few tokens reach the target, all of them do not
        (3.15, 3.0, "target", [2048]),  # few tokens are near it, all of them reach it
        (3.3, 3.0, "finished", [768, 768, 2048]),  # too far to look
    ],
)
def test_a_target_is_confirmed_on_all_tokens(tiny_data, tmp_path, monkeypatch, common, rest, status, tokens):
    def nats(_, batches, __):
        return batches.tokens * (common if batches.tokens == 768 else rest)

    monkeypatch.setattr("hotlap.train.evaluation.total_nats", nats)
    result = train(shared_config(tiny_data, evaluation__target_loss=3.1), tmp_path, "run")
    assert result.status == status
    assert [line["val_tokens"] for line in validations(tmp_path / "run")] == tokens
