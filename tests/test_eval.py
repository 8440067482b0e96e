"""`hotlap eval` measures what the trainer measured, and refuses data that the model cannot read."""

from __future__ import annotations

import json

import pytest

from tests.command import complaint
from tests.trained_run import copied_run, in_process, trained_run, write_texts


def evaluate(capsys, *arguments: str):
    return in_process(capsys, "eval", str(trained_run()), "--device", "cpu", *arguments)


def sources(capsys, *arguments: str):
    result = evaluate(capsys, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["sources"]


def test_it_equals_the_trainers_last_validation(capsys):
    summary = json.loads((trained_run() / "summary.json").read_text())
    (source,) = sources(capsys)
    assert source["loss"] == pytest.approx(summary["val_loss"], abs=1e-6)
    assert source["bpb"] == pytest.approx(summary["val_bpb"], abs=1e-6)
    environment = json.loads((trained_run() / "environment.json").read_text())
    assert source["tokens"] == environment["data"]["val_tokens"]
    assert 0 <= source["tokens_left_out"] < 128
    assert 0 < source["bytes"] <= environment["data"]["val_bytes"]


def test_the_runs_own_data_is_found_from_the_users_home(capsys, tmp_path, monkeypatch):
    run = copied_run(tmp_path)
    path = run / "environment.json"
    environment = json.loads(path.read_text())
    monkeypatch.setenv("HOME", str(trained_run().parents[1]))
    environment["data"]["directory"] = "~/data"
    path.write_text(json.dumps(environment))
    result = in_process(capsys, "eval", str(run), "--device", "cpu", "--tokens", "256", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["sources"][0]["data"] == str(trained_run().parents[1] / "data")


def test_each_source_gets_its_line(capsys):
    data = str(trained_run().parents[1] / "data")
    first, second = sources(capsys, "--data", data, "--data", data, "--tokens", "256")
    assert first == second
    assert first["tokens"] == 256
    table = evaluate(capsys, "--data", data, "--tokens", "256").stdout
    assert f"{first['loss']:.4f}" in table
    assert f"{first['bpb']:.4f}" in table
    assert f"{first['bytes']:,}" in table


def test_data_of_another_tokenizer_is_refused(capsys, tmp_path):
    texts = write_texts(tmp_path / "texts", seed=9)
    prepared = in_process(
        capsys, "data", "prepare", str(texts), "--vocab", "300", "--out", str(tmp_path / "b")
    )
    assert prepared.returncode == 0, prepared.stderr
    assert "data for the model's tokenizer" in complaint(evaluate(capsys, "--data", str(tmp_path / "b")))
    larger = ["data", "prepare", str(texts), "--vocab", "350", "--out", str(tmp_path / "c")]
    assert in_process(capsys, *larger).returncode == 0
    assert "found a vocabulary of 350" in complaint(evaluate(capsys, "--data", str(tmp_path / "c")))


@pytest.mark.parametrize(
    "arguments, part",
    [(["--data", "/nowhere/at/all"], "/nowhere/at/all"), (["--tokens", "100"], "a multiple of 128")],
)
def test_a_wrong_argument_gets_one_line(capsys, arguments, part):
    assert part in complaint(evaluate(capsys, *arguments))
