"""Data without a validation split: prepared, inspected, trained on, resumed, evaluated and reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotlap.runs.reader import RunStatus, load_run
from tests.command import complaint
from tests.trained_run import in_process, write_texts

OPTIONS = "--size pico --vocab-size 300 --steps 4 --precision float32 --device cpu --compile off"
SHORT = OPTIONS.split()


@pytest.fixture
def data(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = write_texts(tmp_path / "texts", documents=12)
    prepared = in_process(
        capsys, "data", "prepare", str(texts), "--vocab", "300", "--val-fraction", "0", "--out", "data"
    )
    assert prepared.returncode == 0, prepared.stderr
    assert "val        none" in prepared.stdout
    return tmp_path / "data"


def test_every_command_works_without_validation(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspected = in_process(capsys, "data", "inspect", "data")
    assert inspected.returncode == 0, inspected.stderr
    assert "val        none" in inspected.stdout

    more = ["--data.source", "data", "--evaluation.every-steps", "2", "--name", "lap"]
    trained = in_process(capsys, "train", "softcap", *SHORT, *more)
    assert trained.returncode == 0, trained.stderr
    assert "validation none: the data has no validation split" in trained.stdout
    assert "report: runs/lap/report.html" in trained.stdout
    run = load_run(data.parent / "runs" / "lap")
    assert run.status is RunStatus.FINISHED
    assert run.validation["val_loss"].size == 0
    assert [sample.step for sample in run.samples] == [2, 4]
    assert json.loads((run.directory / "summary.json").read_text())["val_loss"] is None

    resumed = in_process(capsys, "train", "--resume", "runs/lap", "--allow-change", "--steps", "6")
    assert resumed.returncode == 0, resumed.stderr

    table = in_process(capsys, "eval", "runs/lap")
    assert table.returncode == 0, table.stderr
    assert "no validation split" in table.stdout
    (source,) = json.loads(in_process(capsys, "eval", "runs/lap", "--json").stdout)["sources"]
    assert (source["loss"], source["bpb"], source["tokens"]) == (None, None, 0)
    assert in_process(capsys, "export", "runs/lap", "exported").returncode == 0


def test_a_target_without_validation_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--data.source", "data", "--target-bpb", "1.5"]
    result = in_process(capsys, "train", "softcap", *SHORT, *more)
    assert "a validation split, to tell when the run reaches its target" in complaint(result)
