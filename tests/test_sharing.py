"""Exported repositories compute what the run computes, in a process that has `transformers` and no Hotlap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hotlap.sharing.repository
from hotlap.errors import CheckpointError
from hotlap.inference.export import export
from hotlap.inference.load import load
from hotlap.sharing.forms import open_form
from tests.command import complaint
from tests.trained_run import in_process, trained_run

NEEDED = "transformers is not installed: pip install transformers"
SCRIPT = Path(__file__).with_name("without_hotlap.py")
NAMED = ("softcap", "block-window", "sprint", "adamw")
PROMPTS = ["The people", "Labor and peace, 日本.", "war"]
NEW_TOKENS = 40
TOLERANCE = 1e-5


def loaded_run(recipe: str):
    # Learning rates that leave a mark within a few steps, so that a wrong mask shows in the logits.
    run = trained_run(recipe, f"shared-{recipe}", "--steps 20")
    return load(run, device="cpu", precision="float32")


def rows_of(loaded) -> list[list[int]]:
    """Longer than the window, with documents inside; shorter; one token."""
    text = loaded.tokenizer.encode("The people of peace, 日本. " * 40).tolist()
    end = loaded.tokenizer.end_of_text
    return [[end, *text[:70], end, *text[:380]], [end, *text[:200]], [end]]


def test_other_forms_are_refused_without_the_package_that_checks_them(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("hotlap.sharing.forms.find_spec", lambda _name: None)
    for form in ("transformers", "gguf"):
        words = ("export", str(trained_run()), str(tmp_path / "model"), "--to", form, "--device", "cpu")
        assert f"pip install {form}" in complaint(in_process(capsys, *words))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words, part",
    [(["--to", "onnx"], "invalid choice: 'onnx'"), (["--to", "gguf", "--precision", "bfloat16"], "float32")],
)
def test_a_wrong_option_gets_one_line(capsys, tmp_path, words, part):
    line = complaint(in_process(capsys, "export", str(trained_run()), str(tmp_path / "model"), *words))
    assert part in line
    assert list(tmp_path.iterdir()) == []


def test_hotlap_says_what_a_repository_for_transformers_is(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a repository for transformers, of a model of type gpt2"):
        load(tmp_path, device="cpu")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """(directory of a recipe's repository → what a process without Hotlap computed with it)."""
    folder = tmp_path_factory.mktemp("shared")
    for recipe in NAMED:
        export(loaded_run(recipe), folder / recipe, open_form("transformers"))
    task = {
        "models": [str(folder / recipe) for recipe in NAMED],
        "rows": rows_of(loaded_run("softcap")),
        "prompts": PROMPTS,
        "max_new_tokens": NEW_TOKENS,
    }
    result = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), str(folder / "found")],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    found = load_file(folder / "found")
    return {
        recipe: {
            name.partition(":")[2]: tensor
            for name, tensor in found.items()
            if name.startswith(f"{folder / recipe}:")
        }
        for recipe in NAMED
    }


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason=NEEDED)
class TestWithTransformers:
    @pytest.mark.parametrize("recipe", NAMED)
    def test_logits_are_equal_wherever_the_padding_is(self, shared, recipe):
        loaded = loaded_run(recipe)
        known = loaded.tokenizer.vocab_size
        for number, row in enumerate(rows_of(loaded)):
            expected = loaded.logits(row)[:, :known]
            for side in ("left", "right", "middle"):
                found = shared[recipe][f"{side}:{number}"]
                assert float((found - expected).abs().max()) < TOLERANCE, (side, number)

    @pytest.mark.parametrize("recipe", NAMED)
    def test_a_batch_of_prompts_goes_on_as_each_does_alone(self, shared, recipe):
        loaded = loaded_run(recipe)
        end = loaded.tokenizer.end_of_text
        for number, prompt in enumerate(PROMPTS):
            expected = loaded.generate(prompt, temperature=0, max_tokens=NEW_TOKENS)[0]
            tokens = shared[recipe]["greedy"][number].tolist()
            kept = tokens[: tokens.index(end)] if end in tokens else tokens
            assert prompt + loaded.tokenizer.decode(kept) == expected

    @pytest.mark.parametrize("recipe", NAMED)
    def test_beams_are_the_same_with_and_without_a_cache(self, shared, recipe):
        assert torch.equal(shared[recipe]["beams"], shared[recipe]["beams without cache"])

    @pytest.mark.parametrize("recipe", ["flex-attention", "value-embeds", "unet-value-embeds"])
    def test_the_other_families_pass_the_check_at_export(self, recipe, tmp_path):
        export(loaded_run(recipe), tmp_path / "model", open_form("transformers"))
        assert (tmp_path / "model" / "modeling_hotlap.py").exists()

    def test_the_window_is_that_of_the_checkpoints_step(self, tmp_path):
        loaded = loaded_run("window-warmup")
        export(loaded, tmp_path / "model", open_form("transformers"))
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        assert config["window_tokens"] == loaded.visibility.window_tokens

    def test_wrong_weights_are_noticed_and_nothing_stays(self, capsys, monkeypatch, tmp_path):
        right = hotlap.sharing.repository.speedrun.config_values

        def without_documents(loaded):
            return {**right(loaded), "document_start": None}

        monkeypatch.setattr(hotlap.sharing.repository.speedrun, "config_values", without_documents)
        run = trained_run("softcap", "shared-softcap", "--steps 20")
        words = ("export", str(run), str(tmp_path / "model"), "--to", "transformers", "--device", "cpu")
        assert "logits of the exported model equal to the run's" in complaint(in_process(capsys, *words))
        assert list(tmp_path.iterdir()) == []

    def test_the_command_says_what_it_did_and_hotlap_refuses_to_load_it(self, capsys, tmp_path):
        run, target = trained_run("adamw", "shared-adamw", "--steps 20"), tmp_path / "model"
        words = ("export", str(run), str(target), "--to", "transformers", "--device", "cpu")
        result = in_process(capsys, *words)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        assert "its logits equal the run's to 1e-5 of the largest" in result.stdout
        card = (target / "README.md").read_text()
        assert "library_name: transformers" in card
        assert "AutoModelForCausalLM" in card
        assert "trust_remote_code" not in card
        assert "CC0" in card
        line = complaint(in_process(capsys, "sample", str(target)))
        assert "a repository for transformers, of a model of type gpt2" in line

    def test_a_softcapped_gpt2_is_refused(self, capsys, tmp_path):
        run = trained_run("adamw", "softcapped", "--steps 2 --model.softcap 30")
        words = ("export", str(run), str(tmp_path / "model"), "--to", "transformers", "--device", "cpu")
        assert "model.softcap 0" in complaint(in_process(capsys, *words))
        assert list(tmp_path.iterdir()) == []

    def test_modules_of_an_idea_are_refused_by_name(self, capsys, tmp_path):
        idea = Path(__file__).parents[1] / "ideas" / "swiglu.py"
        run = trained_run(str(idea), "swiglu", "--steps 2")
        words = ["export", str(run), str(tmp_path / "model"), "--to", "transformers", "--device", "cpu"]
        assert "--trust-code" in complaint(in_process(capsys, *words))
        line = complaint(in_process(capsys, *words, "--trust-code"))
        assert "another mlp, from swiglu@" in line
        assert list(tmp_path.iterdir()) == []
