"""An exported directory is the run's model, or it is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hotlap.inference.export
from hotlap.errors import CheckpointError, ConfigError
from hotlap.files import locked_beside, without_folders
from hotlap.inference.export import export
from hotlap.inference.load import load
from tests.command import complaint
from tests.trained_run import in_process, trained_run

TEXT = "The people of peace, 日本. " * 60  # longer than the window


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("export") / "deep" / "model"
    export(load(trained_run(), device="cpu"), target)
    return target


def test_the_command_says_what_it_did(capsys, tmp_path):
    target = tmp_path / "model"
    result = in_process(capsys, "export", str(trained_run()), str(target), "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert str(target) in result.stdout
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in target.iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_second_export_to_the_same_place_is_refused_while_the_first_writes(capsys, tmp_path):
    target = tmp_path / "model"
    words = ("export", str(trained_run()), str(target), "--device", "cpu")
    with locked_beside(target, pytest.fail):
        line = complaint(in_process(capsys, *words))
    assert f"no other process that writes {target}; found process {os.getpid()};" in line
    assert in_process(capsys, *words).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_fresh_process_gets_the_same_logits_and_text(exported, tmp_path):
    loaded = load(trained_run(), device="cpu")
    code = (
        "import sys, hotlap; from safetensors.torch import save_file;"
        "m = hotlap.load(sys.argv[1], device='cpu');"
        "save_file({'logits': m.logits(sys.argv[2])}, sys.argv[3]);"
        "print(m.generate('The', max_tokens=20, temperature=0)[0], end='')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(exported), TEXT, str(tmp_path / "logits")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert result.returncode == 0, result.stderr
    assert torch.equal(load_file(tmp_path / "logits")["logits"], loaded.logits(TEXT))
    assert result.stdout == loaded.generate("The", max_tokens=20, temperature=0)[0]


def test_an_exported_model_can_be_sampled_evaluated_and_exported_again(capsys, exported, tmp_path):
    run = str(trained_run())
    options = ["--device", "cpu", "--tokens", "20"]
    from_export = in_process(capsys, "sample", str(exported), *options)
    assert from_export.stdout == in_process(capsys, "sample", run, *options).stdout
    data = ["--device", "cpu", "--json", "--data", str(trained_run().parents[1] / "data")]
    figures = [json.loads(in_process(capsys, "eval", path, *data).stdout) for path in (run, str(exported))]
    assert figures[0]["sources"] == figures[1]["sources"]
    assert "--data" in complaint(in_process(capsys, "eval", str(exported), "--device", "cpu"))
    export(load(exported, device="cpu"), tmp_path / "again")
    for name in ("model.safetensors", "tokenizer.json", "README.md", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()


def test_the_card_tells_where_the_model_comes_from_and_no_path_does(exported):
    card = (exported / "README.md").read_text()
    summary = json.loads((trained_run() / "summary.json").read_text())
    for part in (
        "softcap",
        "pico",
        "CC0",
        "40 files",
        f"{summary['val_loss']:.4f}",
        f"{summary['val_bpb']:.4f}",
    ):
        assert part in card
    parameters = sum(p.numel() for p in load(exported, device="cpu").model.parameters())
    assert f"{parameters:,}" in card
    assert "hotlap.load" in card
    assert str(trained_run().parents[1]) not in card + (exported / "config.json").read_text()


def test_folders_are_left_out_of_a_sources_name_and_addresses_kept():
    assert without_folders("40 files of /home/me/texts") == "40 files of texts"
    assert without_folders("/home/me/data") == "data"
    assert without_folders("https://example.org/a/b and either/or") == "https://example.org/a/b and either/or"


def test_an_existing_target_is_refused_and_left_alone(capsys, exported, tmp_path):
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    assert "exists" in complaint(in_process(capsys, "export", str(trained_run()), str(exported)))
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    assert "exists" in complaint(in_process(capsys, "export", str(trained_run()), str(tmp_path / "file")))
    beneath = str(tmp_path / "file" / "model")
    assert "to write" in complaint(
        in_process(capsys, "export", str(trained_run()), beneath, "--device", "cpu")
    )


def test_weights_that_differ_after_writing_are_noticed_and_nothing_stays(monkeypatch, tmp_path):
    def save_wrongly(weights, path, **options):
        name = next(iter(weights))
        save_file({**weights, name: weights[name] + 1e-3}, path, **options)

    monkeypatch.setattr(hotlap.inference.export, "save_file", save_wrongly)
    with pytest.raises(CheckpointError, match="equal to the run's"):
        export(load(trained_run(), device="cpu"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_flipped_byte_is_refused_with_its_file(exported, tmp_path, name):
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / name).read_bytes())
    content[-40] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path, device="cpu")


def test_an_exported_model_has_no_checkpoints_to_choose_from(exported):
    with pytest.raises(ConfigError, match="checkpoint"):
        load(exported, checkpoint="best", device="cpu")
