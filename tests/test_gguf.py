"""A GGUF file has the run's tensors and vocabulary under GPT-2's names, read back with `gguf`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hotlap.inference.load import load
from tests.command import complaint
from tests.trained_run import in_process, trained_run

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    from hotlap.inference.export import export
    from hotlap.sharing.forms import open_form

    target = tmp_path_factory.mktemp("gguf") / "model"
    export(load(trained_run("adamw", "gpt2"), device="cpu", precision="float32"), target, open_form("gguf"))
    return target


def test_tensors_equal_the_runs(exported):
    loaded = load(trained_run("adamw", "gpt2"), device="cpu", precision="float32")
    weights = {name: tensor.numpy() for name, tensor in loaded.model.state_dict().items()}
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(exported / "model.gguf").tensors}
    known = loaded.tokenizer.vocab_size
    np.testing.assert_array_equal(found.pop("token_embd.weight"), weights["embed.weight"][:known])
    np.testing.assert_array_equal(found.pop("position_embd.weight"), weights["positions.weight"])
    np.testing.assert_array_equal(found.pop("output_norm.weight"), weights["norm.weight"])
    for layer in range(loaded.config.model.num_layers):
        block = {name.split(".", 2)[2]: found.pop(name) for name in list(found) if f"blk.{layer}." in name}
        ours = {name.split(".", 2)[2]: part for name, part in weights.items() if f"blocks.{layer}." in name}
        qkv = np.concatenate([ours["q.weight"], ours["k.weight"], ours["v.weight"]])
        np.testing.assert_array_equal(block.pop("attn_qkv.weight"), qkv)
        for theirs, name in {
            "attn_norm": "attention_norm",
            "attn_output": "attention_out",
            "ffn_norm": "mlp_norm",
            "ffn_up": "expand",
            "ffn_down": "mlp_out",
        }.items():
            np.testing.assert_array_equal(block.pop(f"{theirs}.weight"), ours[f"{name}.weight"])
        found |= {f"{layer}.{name}": part for name, part in block.items()}
    assert all(name.endswith(".bias") and not part.any() for name, part in found.items())
    assert len(found) == 1 + 6 * loaded.config.model.num_layers


def test_it_says_what_a_reader_needs(exported):
    fields = gguf.GGUFReader(exported / "model.gguf").fields
    loaded = load(trained_run("adamw", "gpt2"), device="cpu")
    expected = {
        "general.architecture": "gpt2",
        "gpt2.context_length": loaded.config.batch.sequence_tokens,
        "gpt2.attention.head_count": loaded.config.model.num_heads,
        "gpt2.block_count": loaded.config.model.num_layers,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.bos_token_id": loaded.tokenizer.end_of_text,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {name: fields[name].contents() for name in expected} == expected
    vocabulary = json.loads(loaded.tokenizer.content)["model"]
    assert fields["tokenizer.ggml.merges"].contents() == vocabulary["merges"]
    words = fields["tokenizer.ggml.tokens"].contents()
    assert {word: number for number, word in enumerate(words)} == vocabulary["vocab"]
    assert "CC0" in (exported / "README.md").read_text()


def test_a_file_that_was_written_wrongly_is_noticed_and_nothing_stays(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_token_list",
        lambda self, words: self.add_array("tokenizer.ggml.tokens", words[:-1]),
    )
    run = str(trained_run("adamw", "gpt2"))
    line = complaint(
        in_process(capsys, "export", run, str(tmp_path / "model"), "--to", "gguf", "--device", "cpu")
    )
    assert "words in model.gguf" in line
    assert list(tmp_path.iterdir()) == []


def test_the_records_model_is_refused_with_the_reason(capsys, tmp_path):
    words = ("export", str(trained_run()), str(tmp_path / "model"), "--to", "gguf", "--device", "cpu")
    line = complaint(in_process(capsys, *words))
    assert "architecture gpt2" in line
    assert "softcap" in line
    assert list(tmp_path.iterdir()) == []
