"""Engines: what keeps one busy, what `--on` refuses, and runs that train at the same time."""

import importlib.util
import io
import re
import shutil
import time

import pytest

from hotlap.errors import RaceError
from hotlap.race.directory import RaceDirectory
from hotlap.race.engine import Task, Training, carry_out, open_engine
from hotlap.race.plan import make_plan
from hotlap.race.progress import RaceProgress
from hotlap.race.runner import Runner
from hotlap.recipes import resolve
from hotlap.runs.reader import RunFiles
from tests.command import complaint, hotlap_here
from tests.made_up_engine import MadeUpEngine
from tests.training import PLAIN

PLAN = make_plan(["softcap", "adamw"], "pico", 4, {"schedule.steps": 50, "schedule.warmup_steps": 0})
NAMES = [start.name for round_ in PLAN.rounds() for start in round_]


def task(root, name, *words, **changes):
    config = resolve("softcap", "pico", {"schedule.steps": 50, **changes})
    return Task(name, root / name, root / "logs" / f"{name}.txt", ("softcap", *words), config)


def test_the_next_task_is_asked_for_only_when_there_is_room(tmp_path):
    engine, asked = MadeUpEngine(slots=2), []

    def tasks():
        for number in range(5):
            asked.append(len(engine.order))
            yield task(tmp_path, str(number))

    ended = [one.task.title for one in carry_out(engine, tasks())]
    assert ended == ["0", "1", "2", "3", "4"]
    assert asked == [0, 1, 2, 3, 4]
    assert engine.most == 2


def test_a_task_that_is_carried_out_already_is_not_started_again(tmp_path):
    engine = MadeUpEngine(slots=3)
    engine.start(task(tmp_path, "found"))
    ended = [one.task.title for one in carry_out(engine, [task(tmp_path, name) for name in ("found", "new")])]
    assert ended == ["found", "new"]
    assert engine.order == ["found", "new"]


def race(tmp_path, engine, work):
    directory = RaceDirectory(tmp_path / "race")
    directory.write_plan(PLAN)
    with RaceProgress(PLAN, 0, io.StringIO()) as progress, engine:
        return work(Runner(PLAN, directory, engine, progress))


def test_runs_at_the_same_time_begin_each_round_with_another_recipe(tmp_path):
    engine = MadeUpEngine(slots=3)
    assert race(tmp_path, engine, Runner.run) == []
    assert engine.most == 3
    assert engine.order[:6] == [*NAMES[:2], NAMES[3], NAMES[2], *NAMES[4:6]]
    assert sorted(engine.order) == sorted(NAMES)


def test_rounds_can_be_run_one_after_the_other_until_it_is_enough(tmp_path):
    engine = MadeUpEngine(slots=8)

    def two_rounds(runner):
        for round_ in PLAN.rounds()[:2]:
            runner.carry_out(round_)

    race(tmp_path, engine, two_rounds)
    assert (engine.order, engine.most) == (NAMES[:4], 2)


def test_a_budget_counts_runs_that_train_at_the_same_time(tmp_path):
    def within(budget_s, slots, at):
        engine = MadeUpEngine(slots=slots)
        engine.seconds = 60.0
        race(tmp_path / at, engine, lambda runner: runner.run(budget_s))
        return len(engine.order)

    assert within(0.001, 8, "nothing") == 2
    # The first round tells the pace; the others are started one by one while those before them train, of
    # which half is said to be done.
    assert within(100, 1, "one by one") == 2
    assert within(100, 4, "four at once") == 8


@pytest.mark.parametrize("on", ["moon", "local=here", "ray=", ""])
def test_an_engine_that_does_not_exist_is_refused(on, tmp_path):
    arguments = ["race", "softcap", "--size", "pico", f"--on={on}", "--runs", str(tmp_path / "runs")]
    assert "--on local, ray or ray=ADDRESS" in complaint(hotlap_here(*arguments))
    assert not (tmp_path / "runs").exists()


def test_logs_that_vanish_get_one_line(tmp_path):
    engine = open_engine("local", tmp_path, None, print)
    with pytest.raises(RaceError, match=r"to write .*/logs/a\.txt; found No such file or directory"):
        engine.start(task(tmp_path, "a"))
    assert engine.training() == []

    class Vanishing(MadeUpEngine):
        def wait(self, seconds):
            ended = super().wait(seconds)
            shutil.rmtree(ended[0].task.log.parent)
            return ended

    with pytest.raises(RaceError, match=r"to finish; found exit code 2 and `nothing`"):
        race(tmp_path, Vanishing(ends={NAMES[0]: "interrupted"}), Runner.run)


def test_without_ray_one_line_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    arguments = ["race", "softcap", "--size", "pico", "--on", "ray", "--runs", str(tmp_path / "runs")]
    line = complaint(hotlap_here(*arguments))
    assert "the package ray for --on ray; found it is not installed; pip install ray" in line
    assert not (tmp_path / "runs").exists()


def test_a_race_with_runs_on_a_cluster_is_not_trained_here(tmp_path):
    (tmp_path / "race").mkdir()
    (tmp_path / "race" / ".ray.json").write_text("{}")
    arguments = ["race", "softcap", "--size", "pico", "--runs", str(tmp_path), "--name", "race"]
    assert "--on ray for" in complaint(hotlap_here(*arguments))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_every_run_that_trains_or_how_many_more(monkeypatch, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "8")
    runs = [
        Training(task(tmp_path, f"softcap, seed {seed}"), seed / 8, "3f2a91c0" if seed else None)
        for seed in range(8)
    ]

    def shown(count):
        stream = Terminal()
        with RaceProgress(PLAN, 3, stream) as progress:
            progress.training(runs[:count], 250.0)
            progress._bar._live.refresh()
            progress.say("race: a line between")
        text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())
        return [line.rstrip() for line in text.replace("\r", "\n").splitlines()]

    few = shown(2)
    assert "   0%  softcap, seed 0" in few
    assert "  12%  softcap, seed 1 on 3f2a91c0" in few
    assert any(line.endswith("3 of 8 runs, about 0:04:10 left") for line in few)
    assert "race: a line between" in few
    many = shown(8)
    assert "       and 4 more" in many
    assert "  50%  softcap, seed 4 on 3f2a91c0" not in many
    assert all(len(line) <= 80 for line in many)


# --- with real runs ---


@pytest.mark.slow
def test_local_runs_train_at_once_and_stop_with_a_checkpoint(tiny_data, tmp_path):
    changes = {**PLAIN, "data.source": str(tiny_data), "schedule.steps": 100_000}
    words = ["--size", "pico", *(f"--{name}={value}" for name, value in changes.items())]
    tasks = [task(tmp_path, str(seed), *words, f"--seed={seed}", **changes) for seed in range(3)]
    (tmp_path / "logs").mkdir()
    said = []
    engine = open_engine("local", tmp_path, None, said.append, at_once=2)

    def stop_when_both_train():
        shares = [one.share for one in engine.training()]
        if len(shares) == 2 and min(shares) > 0:
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), engine:
        next(carry_out(engine, tasks, stop_when_both_train))
    assert engine.training() == []
    assert time.monotonic() - began < 120
    for one in tasks[:2]:
        assert RunFiles(one.path).read_status() == "interrupted"
        assert any(RunFiles(one.path).checkpoints.glob("step-*"))
    assert not tasks[2].path.exists()
