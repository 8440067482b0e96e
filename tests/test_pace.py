"""A run that ends by the clock: when its steps are planned again, and what a resumed run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.train import loop, pace
from hotlap.train.pace import Pace, with_steps
from tests.training import final_weights, losses, pico, train


class Watch:
    """A clock that a test sets."""

    def __init__(self, total_s: float = 0.0) -> None:
        self.total_s = total_s
        self.training_s = 0.0
        self.seconds = {"saving": 0.0}

    def train(self, seconds: float) -> None:
        self.total_s += seconds
        self.training_s += seconds


def trained_for(speed, minutes: float, steps: int, setup_s: float = 10.0, validation_s: float = 0.0) -> float:
    """The seconds that a command takes whose steps take `speed(step)`, planned as `steps` at first."""
    watch = Watch(setup_s)
    planner, step = Pace(minutes, watch, 0), 0
    if validation_s:
        planner.validated(1000, validation_s)
    while step < steps:
        watch.train(speed(step))
        step += 1
        steps = planner.new_steps(step, steps, 1000 if validation_s else 0, samples=1) or steps
    return watch.total_s + validation_s + pace.SAMPLE_S + pace.END_S + pace.END_OF_SETUP * setup_s


@pytest.mark.parametrize("minutes", [0.5, 3, 60])
@pytest.mark.parametrize("guessed_steps", [20, 200, 100_000])
def test_the_end_is_in_time_whatever_was_guessed_at_first(minutes, guessed_steps):
    took = trained_for(lambda _: 0.05, minutes, guessed_steps, validation_s=1.0)
    assert took == pytest.approx(60 * minutes, rel=0.03)


def test_a_machine_that_becomes_slower_on_the_way_ends_in_time():
    took = trained_for(lambda step: 0.05 if step < 500 else 0.15, 1, 1000)
    assert took == pytest.approx(60, rel=0.05)


def test_if_setting_up_takes_longer_than_the_minutes_it_trains_for_a_fifth_of_them():
    took = trained_for(lambda _: 0.05, 1, 100, setup_s=100.0)
    assert took == pytest.approx(100 + 12 + pace.END_S + pace.END_OF_SETUP * 100, abs=1)


def test_nothing_is_planned_again_when_the_end_is_near_enough():
    watch = Watch(0.0)
    planner = Pace(1, watch, 0)
    in_time = round((60 - pace.END_S) / 0.05)
    for step in range(1, in_time):
        watch.train(0.05)
        assert planner.new_steps(step, in_time, 0, 0) is None


def test_what_is_in_proportion_to_the_steps_follows_them(tiny_data):
    config = pico(tiny_data, 100, schedule__cooldown_fraction=0.0, schedule__cooldown_steps=40)
    longer = with_steps(config, 150)
    assert (longer.schedule.steps, longer.schedule.cooldown_steps) == (150, 60)
    assert longer.optim.muon.momentum_warmup_steps == 15
    assert longer.evaluation.every_steps == round(1.5 * config.evaluation.every_steps)


@pytest.fixture
def planned(monkeypatch):
    """After step 3 of 6, plan for 9 steps; and another plan after step 5 if a resumed run should plan."""
    plans = {3: 9, 7: 12}

    def new_steps(self, step, steps, *_, **__):
        return plans.get(step)

    monkeypatch.setattr(Pace, "new_steps", new_steps)
    return plans


def paced(data: Path):
    return pico(data, 6, schedule__minutes=1.0, evaluation__every_steps=0, schedule__cooldown_fraction=0.5)


def test_a_new_plan_is_recorded_and_the_schedule_follows_it(tiny_data, tmp_path, planned):
    result = train(paced(tiny_data), tmp_path, "run")
    assert result.summary["steps"] == 12
    run = RunDirectory(tmp_path / "run")
    assert run.read_config().schedule.steps == 12
    lines = run.read_metrics().lines
    assert [(line["step"], line["steps"]) for line in lines if line["kind"] == "plan"] == [(3, 9), (7, 12)]
    rates = [line["lr"] for line in lines if line["kind"] == "train"]
    # The second half is the cooldown: of 6 steps at first, of 9 after the third, of 12 after the seventh.
    assert rates[:3] == [1, 1, 1]
    assert rates[6] == pytest.approx((9 - 6) / 4.5)
    assert rates[8:] == pytest.approx([(12 - step) / 6 for step in range(8, 12)])
    assert "pace: 9 steps instead of 6" in (tmp_path / "run" / "log.txt").read_text()


def test_killed_after_a_plan_and_resumed_the_run_is_the_same_bit_for_bit(tiny_data, tmp_path, planned):
    del planned[7]
    train(paced(tiny_data), tmp_path, "whole")
    updates = loop.Trainer.update

    def update(trainer):
        if trainer.progress.step == 5:
            raise KeyboardInterrupt
        updates(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "update", update)
        with pytest.raises(KeyboardInterrupt):
            train(paced(tiny_data), tmp_path, "killed")
    saved = store.load_latest(tmp_path / "killed" / "checkpoints")[0]
    assert (saved.step, saved.state["config"]["schedule"]["steps"]) == (3, 9)
    planned[7] = 12  # a resumed run keeps the plan that it had
    train(RunDirectory(tmp_path / "killed").read_config(), tmp_path, "killed", resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for name, tensor in final_weights(tmp_path / "whole").items():
        assert torch.equal(tensor, final_weights(tmp_path / "killed")[name]), name
