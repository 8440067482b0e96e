"""Trackers against `metrics.jsonl`: the real packages, across a kill and a resume; and trackers that fail."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hotlap.runs.directory import RunDirectory
from hotlap.runs.trackers import FOLLOWED, TRACKERS, Trackers, new_name, values
from hotlap.runs.wandb_files import BLOCK_BYTES, FILE_HEADER_BYTES, history, records
from tests.command import complaint, hotlap, hotlap_here
from tests.training import command, start

TRAIN = {"kind": "train", "step": 3, "loss": 2.5, "lr": 1.0, "grad_norm": None, "train_s": 0.1}


STEPS = 120


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the package {package} is not installed")


class Failing:
    """A tracker that fails at one of its calls."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.written: list[int] = []

    def write(self, line):
        if self.at == "write":
            raise OSError("no space left\non the server")
        self.written.append(line["step"])

    def close(self):
        if self.at == "close":
            raise ValueError


def opened(monkeypatch, **made) -> Trackers:
    for name, tracker in made.items():
        monkeypatch.setitem(TRACKERS, name, lambda *_, tracker=tracker: tracker)
    found = Trackers()
    for name in made:
        assert found.open(name, Path(), {}, []) == []
    return found


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(monkeypatch):
    good = Failing("never")
    found = opened(monkeypatch, tensorboard=Failing("write"), wandb=good)
    (line,) = found.write(TRAIN)
    assert line == (
        "the tracker tensorboard failed and is left out, training goes on: no space left on the server"
    )
    assert found.write({**TRAIN, "step": 4}) == []
    assert good.written == [3, 4]


def test_one_that_fails_at_the_end_is_told_too(monkeypatch):
    found = opened(monkeypatch, wandb=Failing("close"))
    assert found.close() == ["the tracker wandb failed and is left out, training goes on: ValueError"]


def test_one_that_does_not_open_is_told_and_left_out(monkeypatch, tmp_path):
    def refuse(*_):
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(TRACKERS, "wandb", refuse)
    found = Trackers()
    (line,) = found.open("wandb", tmp_path, {}, [])
    assert line.endswith("training goes on: api_key not configured")
    assert found.write(TRAIN) == []


def test_a_tracker_gets_the_lines_that_were_recorded_before_it_was_asked_for(monkeypatch, tmp_path):
    given = []
    monkeypatch.setitem(TRACKERS, "wandb", lambda *opened: given.extend(opened[-1]))
    lines = [TRAIN, {"kind": "sample", "step": 3, "text": "…"}, {"kind": "resume", "step": 3}]
    Trackers().open("wandb", tmp_path, {}, lines)
    assert given == [TRAIN]


def test_values_are_the_numbers_of_a_line_by_its_kind():
    assert values(TRAIN) == {"train/loss": 2.5, "train/lr": 1.0, "train/train_s": 0.1}


def test_a_run_gets_a_name_of_its_own_among_those_of_other_folders():
    assert new_name("lap", []) == "lap"
    assert new_name("lap", ["lap", "lap-2"]) == "lap-3"


@pytest.mark.parametrize("name, part", [("mlflow", "found mlflow; choose one"), ("wandb", "pip install")])
def test_an_unknown_or_missing_tracker_is_one_line_before_anything_starts(monkeypatch, tmp_path, name, part):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    assert part in complaint(hotlap_here("train", "softcap", "--size", "pico", "--log", name, cwd=tmp_path))
    assert not list(tmp_path.iterdir())


def log_of(contents: list[bytes]) -> bytes:
    """In LevelDB's format, with records split at the ends of blocks."""
    log = bytearray(FILE_HEADER_BYTES)
    for content in contents:
        rest, is_first = content, True
        while rest or is_first:
            left = BLOCK_BYTES - len(log) % BLOCK_BYTES
            if left < 7:
                log += bytes(left)
                left = BLOCK_BYTES
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if is_first else 4) if not rest else (2 if is_first else 3)
            log += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    return bytes(log)


def test_records_of_any_length_are_read_whole_and_a_cut_one_is_left_out():
    up_to_the_end = b"z" * (BLOCK_BYTES - FILE_HEADER_BYTES - 7 - 3)  # leaves no room for a header
    contents = [up_to_the_end, b"a" * 10, b"b" * 3 * BLOCK_BYTES, b"", b"c" * (BLOCK_BYTES - 100), b"end"]
    log = log_of(contents)
    assert list(records(log)) == contents
    assert list(records(log[:-1])) == contents[:-1]
    assert list(records(b"")) == []


def lines_of(run: Path) -> list[dict[str, Any]]:
    return RunDirectory.open(run).read_metrics().lines


def expected_values(run: Path) -> dict[tuple[str, int], float]:
    lines = [line for line in lines_of(run) if line["kind"] in FOLLOWED]
    found = {(name, line["step"]): value for line in lines for name, value in values(line).items()}
    assert len(found) == sum(len(values(line)) for line in lines), "metrics.jsonl has a step twice"
    return found


def tensorboard_values(run: Path) -> list[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [
        (name, event.step, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)
    ]


def wandb_values(run: Path) -> list[tuple[str, int, float]]:
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1, "one run of W&B"
    rows = [row for path in files for row in history(path)]
    return [(name, row["_step"], value) for row in rows for name, value in row.items() if "/" in name]


def trackio_values(run: Path) -> list[tuple[str, int, float]]:
    with sqlite3.connect(run.parents[1] / "trackio" / "hotlap.db") as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics").fetchall()
    assert {name for _, name, _, _ in rows} == {run.name}
    assert len({run_id for run_id, *_ in rows}) == 1, "one run of trackio"
    return [(key, step, value) for _, _, step, text in rows for key, value in json.loads(text).items()]


TIMELESS = ("train/loss", "train/lr", "train/momentum", "train/tokens", "validation/val_loss")
READ_BACK = {
    "tensorboard": tensorboard_values,
    "wandb": wandb_values,
    "trackio": trackio_values,
}


def settings_of_trackers(folder: Path) -> dict[str, str]:
    places = ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR")
    made = {name: str(folder / name.partition("_")[0].lower()) for name in places}
    return {**made, "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def kill_after(lines: int, words: list[str], folder: Path, env: dict[str, str]) -> None:
    """Start the command and kill -9 it when it has recorded this many lines."""
    metrics = folder / "runs" / "lap" / "metrics.jsonl"
    process = start(words, folder, **env)
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in TRACKERS])
def test_across_a_kill_and_a_resume_it_has_what_the_metrics_have(tiny_data, tmp_path, name):
    words = command(tiny_data, STEPS, "--name", "lap", "--checkpoint.every-steps", "15", "--log", name)
    words += ["--evaluation.every-steps", "25", "--resume", "auto"]
    env = settings_of_trackers(tmp_path)
    kill_after(40, words, tmp_path, env)
    kill_after(80, words, tmp_path, env)
    ended = hotlap(*words, cwd=tmp_path, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "training goes on" not in ended.stdout
    run = tmp_path / "runs" / "lap"
    resumed = [line["step"] for line in lines_of(run) if line["kind"] == "resume"]
    assert len(resumed) == 2
    assert resumed[0] < resumed[1]
    expected, found = expected_values(run), READ_BACK[name](run)
    recorded = {(key, step): value for key, step, value in found}
    assert len(recorded) == len(found), "a step twice"
    assert recorded.keys() == expected.keys()
    # What was trained twice has the same losses, not the same times.
    timeless = {key: value for key, value in expected.items() if key[0] in TIMELESS}
    assert len(timeless) > 4 * STEPS
    assert {key: recorded[key] for key in timeless} == pytest.approx(timeless)


@needs("tensorboard")
def test_tensorboard_that_cannot_write_is_told(tmp_path):
    (tmp_path / "tensorboard").write_text("not a directory")
    (line,) = Trackers().open("tensorboard", tmp_path, {}, [])
    assert line.startswith("the tracker tensorboard failed and is left out")


BROKEN = {
    "trackio": {"TRACKIO_DIR": "file/below"},
    "wandb": {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in BROKEN])
def test_a_real_tracker_that_cannot_work_stops_no_training(tiny_data, tmp_path, name):
    (tmp_path / "file").write_text("not a directory")
    words = command(tiny_data, 5, "--name", "lap", "--log", name)
    ended = hotlap(*words, cwd=tmp_path, env={**settings_of_trackers(tmp_path), **BROKEN[name]})
    assert ended.returncode == 0, ended.stderr
    said = [line for line in ended.stdout.splitlines() if "is left out, training goes on" in line]
    assert len(said) == 1, ended.stdout
    assert f"tracker {name} failed" in said[0]
    run = tmp_path / "runs" / "lap"
    assert [line["step"] for line in lines_of(run) if line["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert said[0] in (run / "log.txt").read_text()
