"""`hotlap train --minutes`: what is chosen from measured laps, and what a user is told and refused."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from hotlap.commands.train import words_of_rank
from hotlap.config import Config
from hotlap.dial import measure
from hotlap.dial.choose import BASE, Lap, Table, at_size, best_lap, bpb_at, choose, frontier, table
from hotlap.dial.text import Text, added_bits_per_byte, measure_text, sample_of
from hotlap.errors import DataError
from hotlap.recipes import resolve
from hotlap.runs.directory import RunDirectory
from tests.command import complaint, hotlap_here
from tests.trained_run import write_texts

SMALL, LARGE = {"model.width": 96}, {"model.width": 192, "model.dropout": 0.5}
MEASURED = Table(
    "today",
    {20_000: 3.0, 1_000_000: 2.0},
    [
        Lap(20_000, 10, 10, 1.0, 2.5, SMALL),
        Lap(20_000, 100, 25, 4.0, 2.3, LARGE),
        Lap(1_000_000, 100, 100, 1.0, 1.7, SMALL),
        Lap(1_000_000, 1000, 250, 4.0, 1.5, LARGE),
        Lap(1_000_000, 2000, 500, 4.0, 1.6, LARGE),  # too many epochs
    ],
)


def text(train_bytes: int, val_bytes: int = 10**9, predictability: float = 1.0) -> Text:
    usual = at_size(MEASURED.compressed, train_bytes)
    return Text(train_bytes, train_bytes // 4, val_bytes, predictability * usual)


def middle(bpb: tuple[float, float] | None) -> float:
    assert bpb is not None
    return math.sqrt(bpb[0] * bpb[1])


@pytest.mark.parametrize(
    ("train_bytes", "base_steps", "settings"),
    [
        (20_000, 5, SMALL),
        (30_000, 14, SMALL),
        (30_000, 99, LARGE),
        (900_000, 100, SMALL),
        (900_000, 900, LARGE),
        (900_000, 1400, LARGE),
    ],
)
def test_the_best_lap_of_about_as_much_compute_on_a_text_of_about_that_size(
    train_bytes, base_steps, settings
):
    assert choose(text(train_bytes), base_steps, MEASURED).settings == settings


def test_a_better_lap_is_not_trained_for_much_longer_than_it_was_measured():
    assert best_lap(MEASURED.laps[2:], 1200).bpb == 1.5
    assert best_lap(MEASURED.laps[2:], 1400).bpb == 1.6
    assert middle(choose(text(1_000_000), 1400, MEASURED).bpb) == pytest.approx(1.6)


def test_a_lap_that_learned_its_text_by_heart_is_no_candidate():
    laps = [Lap(20_000, 10, 10, 1.0, 2.5, SMALL), Lap(20_000, 1000, 250, 4.0, 3.3, LARGE)]
    assert best_lap(laps, 1000).bpb == 2.5


def test_far_more_time_than_was_measured_gets_a_larger_model_with_dropout_and_takes_as_long():
    choice = choose(text(1_000_000), 48 * 1000, MEASURED)
    assert choice.settings["model.width"] == 384  # 192 times the fourth root of 16
    assert choice.settings["model.num_heads"] == 6
    assert choice.settings["model.dropout"] == 0.6  # 25 epochs
    assert choose(text(1_000_000), 480_000, MEASURED).settings["model.dropout"] == 0.7  # 73 epochs
    assert choice.relative_step == pytest.approx(4 * (384 / 192) ** 2)
    assert LARGE["model.width"] == 192  # the table stays as it is


def test_expected_is_what_was_measured_there_and_lies_between_elsewhere():
    assert middle(choose(text(20_000), 100, MEASURED).bpb) == pytest.approx(2.3)
    assert middle(choose(text(1_000_000), 1000, MEASURED).bpb) == pytest.approx(1.5)
    between = middle(choose(text(150_000), 100, MEASURED).bpb)
    assert 1.7 < between < 2.3
    assert middle(choose(text(150_000), 60, MEASURED).bpb) > between


def test_more_compute_than_was_measured_is_said_to_be_extrapolated_and_widens_the_range():
    within, beyond = choose(text(1_000_000), 1000, MEASURED), choose(text(1_000_000), 10**5, MEASURED)
    assert not within.extrapolated
    assert beyond.extrapolated == ("2,000 steps of compute",)
    assert beyond.bpb[1] / beyond.bpb[0] > within.bpb[1] / within.bpb[0]
    assert choose(text(10**8), 1000, MEASURED).extrapolated == ("texts of 20 kB to 1 MB",)


def test_a_validation_that_is_harder_to_predict_is_expected_to_have_more_bits_in_a_wider_range():
    usual, harder = (choose(text(20_000, 10**9, by), 100, MEASURED) for by in (1.0, 1.1))
    assert middle(harder.bpb) == pytest.approx(1.1**0.5 * middle(usual.bpb))
    assert harder.bpb[1] / harder.bpb[0] > usual.bpb[1] / usual.bpb[0]


def test_a_validation_of_few_bytes_widens_the_range_and_none_has_none():
    many, few = (choose(text(20_000, val_bytes), 100, MEASURED).bpb for val_bytes in (10**6, 1000))
    assert few[1] / few[0] > many[1] / many[0] > 1
    assert choose(text(20_000, 0), 100, MEASURED).bpb is None


def test_laps_that_a_cheaper_one_beats_do_not_count():
    points = frontier([lap for lap in MEASURED.laps if lap.text_bytes == 1_000_000])
    assert points == [(100, 1.7), (1000, 1.5)]
    assert bpb_at(points, 10_000) == pytest.approx(1.4)
    assert bpb_at(points, 10) == pytest.approx(1.9)
    assert bpb_at([(75, 3.0), (77, 2.5)], 10_000) == 2.5  # noise has no slope


def test_every_measured_lap_can_be_trained_and_all_sizes_have_some():
    laps = table().laps
    assert {lap.text_bytes for lap in laps} >= {20_000, 100_000, 300_000, 1_000_000}
    for lap in laps:
        assert resolve(*BASE, lap.settings).model.num_layers == lap.settings["model.num_layers"]
        assert lap.base_steps == pytest.approx(lap.steps * lap.relative_step, rel=0.02)
    assert set(table().compressed) == {lap.text_bytes for lap in laps}


def test_the_samples_of_a_text_are_the_end_of_training_and_the_beginning_of_validation(tmp_path):
    folder = write_texts(tmp_path / "texts", documents=30, words=400)
    result = hotlap_here("data", "prepare", str(folder), "--vocab", "300", "--out", str(tmp_path / "data"))
    assert result.returncode == 0, result.stderr
    assert sample_of(tmp_path / "data", "train", 1000) == (folder / "029.txt").read_bytes()[-1000:]
    first_of_val = (folder / "010.txt").read_bytes()
    assert sample_of(tmp_path / "data", "val", 1000) == b"<|endoftext|>" + first_of_val[: 1000 - 13]
    measured = measure_text(tmp_path / "data")
    assert measured.train_bytes + measured.val_bytes == sum(len(p.read_bytes()) for p in folder.iterdir())
    assert 0.3 < measured.compressed_bpb < 4


def test_shards_without_a_manifest_are_refused(tmp_path):
    with pytest.raises(DataError, match="a manifest that counts the bytes of text"):
        measure_text(tmp_path)


def test_what_has_been_seen_before_adds_little():
    seen, other = (random.Random(seed).randbytes(10_000) for seed in (0, 1))
    assert added_bits_per_byte(seen, seen) < 2 < 7.9 < added_bits_per_byte(other, seen)


@pytest.fixture
def own_text(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "seconds_per_step", lambda *_: 0.05)
    return write_texts(tmp_path / "texts", documents=30, words=400)


def test_a_dry_run_says_what_would_be_chosen_what_to_expect_and_how_long_it_takes(own_text, tmp_path):
    said = hotlap_here("train", "--minutes", "2", "--data", str(own_text), "--dry-run", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    lines = {line.split(" ")[0]: line for line in said.stdout.splitlines()}
    assert "layers ×" in lines["chosen"]
    assert "for 120 s" in lines["chosen"]
    assert "bits per byte, by measured laps" in lines["expected"]
    assert lines["time"] == "time       120 s for the whole command; the steps follow the clock"
    assert "MiB" in lines["memory"]
    assert "epochs of" in lines["epochs"]
    assert not (tmp_path / "runs").exists()


def test_settings_that_are_given_are_kept(own_text, tmp_path):
    words = ["train", "--minutes", "2", "--data", str(own_text), "--dry-run", "--json"]
    given = ["--model.width", "128", "--evaluation.every-steps", "7", "--seed", "3", "--dropout", "0.1"]
    config = json.loads(hotlap_here(*words, *given, cwd=tmp_path).stdout)
    assert (config["model"]["width"], config["model"]["dropout"], config["seed"]) == (128, 0.1, 3)
    assert (config["evaluation"]["every_steps"], config["schedule"]["minutes"]) == (7, 2.0)


def test_with_a_recipe_minutes_only_set_its_steps(own_text, tiny_data, tmp_path):
    words = ["train", "softcap", "--size", "pico", "--data", str(tiny_data), "--dry-run", "--json"]
    plain, timed = (
        json.loads(hotlap_here(*words, *more, cwd=tmp_path).stdout) for more in ([], ["--minutes", "1"])
    )
    assert timed["model"] == plain["model"]
    assert timed["batch"] == plain["batch"]
    assert 700 < timed["schedule"]["steps"] < 1200
    assert timed["schedule"]["cooldown_fraction"] == plain["schedule"]["cooldown_fraction"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--minutes 5 --steps 100", "found --minutes 5 and --steps 100; leave one out"),
        ("sprint --minutes 5 --schedule.minutes 3", "found --minutes 5 and --schedule.minutes 3.0"),
        ("--minutes 0.2", "expected --minutes of at least 0.5"),
        ("--minutes nan", "found nan; give more time"),
        ("--minutes soon", "invalid float value: 'soon'"),
        ("--minutes 5 --size nano", "found --size nano without a RECIPE"),
        ("--minutes 5 --procs 2", "found --procs 2 without a RECIPE"),
        ("--minutes 5 --resume runs/x", "a resumed run keeps its plan; found --minutes 5"),
        ("--steps 5", "`hotlap train --minutes 2` trains on the default corpus"),
    ],
)
def test_what_contradicts_is_refused_in_one_line(words, said, tmp_path):
    assert said in complaint(hotlap_here("train", *words.split(), cwd=tmp_path))


def test_a_race_refuses_runs_that_end_by_the_clock(tmp_path):
    words = ["race", "softcap", "softcap:schedule.minutes=1", "--size", "pico", "--seeds", "2"]
    assert "runs that end by their number of steps" in complaint(hotlap_here(*words, cwd=tmp_path))


def test_ranks_get_what_was_measured_once():
    class Arguments:
        words = ("softcap", "--minutes", "5", "--procs=2", "--evaluation.every-steps", "9")
        settings = {"evaluation.every-steps": "9"}  # noqa: RUF012
        minutes, resume, name = 5.0, None, None

    config = resolve("softcap", "pico", {"schedule.steps": 321, "schedule.minutes": 5.0})
    words = words_of_rank(Arguments(), config, None)
    assert words[:4] == ["train", "softcap", "--evaluation.every-steps", "9"]
    assert {"--schedule.minutes=5.0", "--schedule.steps=321"} < set(words)
    assert sum("evaluation.every" in word for word in words) == 1


@pytest.mark.slow
def test_half_a_minute_on_own_text_ends_near_its_time_with_everything_a_run_has(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    folder = write_texts(tmp_path / "texts", documents=30, words=400)
    result = hotlap_here("train", "--minutes", "0.5", "--data", str(folder), "--threads", "1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    run = RunDirectory(tmp_path / "runs" / "sprint-nano-0")
    config: Config = run.read_config()
    assert config.schedule.minutes == 0.5
    assert (tmp_path / "runs" / "sprint-nano-0" / "report.html").exists()
    summary = json.loads((tmp_path / "runs" / "sprint-nano-0" / "summary.json").read_text())
    assert summary["steps"] == config.schedule.steps
    # Loose: other tests run beside it.
    assert 15 < summary["seconds"]["total"] < 60
