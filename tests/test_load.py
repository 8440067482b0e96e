"""What `load` gives is what the trainer had; what cannot be loaded is refused by name."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from torch.nn import functional as F

import hotlap
from hotlap.data.stream import open_split
from hotlap.errors import CheckpointError, ConfigError, DataError, DeviceError
from hotlap.inference.load import LoadedModel, load
from hotlap.kernels import choose_backend
from hotlap.model import build_model
from hotlap.recipes import resolve
from hotlap.runs import checkpoint as store
from hotlap.settings import updated
from hotlap.train.masking import Masking
from tests.command import complaint
from tests.trained_run import copied_run, in_process, trained_run, write_texts


def load_quietly(path, **options):
    return load(path, device="cpu", **options)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_quietly(trained_run())


def test_load_is_at_hand_and_importing_hotlap_is_light():
    assert hotlap.load is load
    with pytest.raises(AttributeError, match="lod"):
        hotlap.lod  # noqa: B018


def test_the_weights_are_those_of_the_checkpoint(loaded):
    saved = store.load(store.latest(trained_run() / "checkpoints"))
    weights = loaded.model.state_dict()
    assert weights.keys() == saved.tensors["model"].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.tensors["model"].items())
    assert loaded.step == 3
    assert loaded.config.recipe == "softcap"
    assert loaded.model.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_loading_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    load_quietly(trained_run())
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_give_the_loss_that_the_trainer_computes(loaded):
    val = open_split(trained_run().parents[1] / "data", "val")
    tokens = torch.from_numpy(val.read(0, 513).astype("int64"))
    inputs, targets = tokens[:-1], tokens[1:]
    cpu = torch.device("cpu")
    masking = Masking(loaded.config, choose_backend("dense", cpu), val.end_of_text, cpu)
    masking.set_step(3)
    with torch.no_grad():
        expected = loaded.model(inputs, targets, masking.plans(inputs, None))
    logits = loaded.logits(inputs.tolist())
    assert logits.shape == (512, 300)
    # The head's padding takes part in the loss, with logits of its own.
    with torch.no_grad():
        hidden = loaded.model.hidden(inputs, masking.plans(inputs, None))
        padding = 15 * torch.tanh(F.linear(hidden, loaded.model.head.weight[300:]) / 15)
    found = F.cross_entropy(torch.cat([logits, padding], dim=1), targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_text_is_read_as_the_start_of_a_document(loaded):
    ids = [loaded.tokenizer.end_of_text, *loaded.tokenizer.encode("people of peace").tolist()]
    assert torch.equal(loaded.logits("people of peace"), loaded.logits(ids))
    assert len(loaded.logits("")) == 1


def test_generate_gives_whole_texts(loaded):
    texts = loaded.generate("people", max_tokens=20, num_samples=2, seed=5)
    assert len(texts) == 2
    assert all(text.startswith("people") and len(text) > len("people") for text in texts)
    assert loaded.generate("people", max_tokens=20, seed=5) == texts[:1]


@pytest.mark.parametrize("ids", [[], [300], [-1]])
def test_ids_that_are_no_tokens_are_refused(loaded, ids):
    with pytest.raises(ConfigError, match="0 to 299"):
        loaded.logits(ids)


def test_gpt2_refuses_logits_beyond_its_context_but_writes_on(loaded):
    config = updated(resolve("adamw", "pico"), {"model.vocab_size": 300})
    model = build_model(config.model, config.batch.sequence_tokens)
    gpt2 = LoadedModel(dataclasses.replace(loaded.stored, config=config), model, torch.device("cpu"))
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        gpt2.logits([1] * 513)
    (text,) = gpt2.generate("people " * 500, max_tokens=5)
    assert len(text) > len("people " * 500)


def with_val_loss(run, step: int, val_loss: float | None) -> None:
    saved = store.load(store.latest(run / "checkpoints"))
    state = {**saved.state, "val_loss": val_loss}
    store.save(run / "checkpoints", store.Checkpoint(step, saved.tensors, state), keep=9)


def test_the_checkpoint_is_the_one_asked_for(tmp_path):
    run = copied_run(tmp_path)
    with_val_loss(run, 4, 0.5)
    with_val_loss(run, 5, 0.7)
    assert load_quietly(run).step == 4
    assert load_quietly(run, checkpoint="best").step == 4
    assert load_quietly(run, checkpoint="latest").step == 5
    assert load_quietly(run, checkpoint="step-000003").step == 3
    assert load_quietly(run, checkpoint=str(run / "checkpoints" / "step-000003")).step == 3
    with pytest.raises(CheckpointError, match="step-000009"):
        load_quietly(run, checkpoint="step-000009")


def test_no_checkpoint_is_the_best_when_none_was_measured(tmp_path):
    run = copied_run(tmp_path)
    with_val_loss(run, 3, None)
    assert load_quietly(run).step == 3
    assert not load_quietly(run).stored.is_best
    with pytest.raises(CheckpointError, match="validation loss"):
        load_quietly(run, checkpoint="best")


def test_the_tokenizer_is_the_runs_own_copy_or_that_of_its_data(tmp_path, loaded):
    run = copied_run(tmp_path)
    own = run / "tokenizer.json"
    own.write_bytes(loaded.tokenizer.content)
    environment = json.loads((run / "environment.json").read_text())
    environment["data"]["directory"] = str(tmp_path / "gone")
    (run / "environment.json").write_text(json.dumps(environment))
    assert load_quietly(run).tokenizer.fingerprint == loaded.tokenizer.fingerprint

    own.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        _ = load_quietly(run).tokenizer
    own.unlink()
    with pytest.raises(DataError, match="neither"):
        _ = load_quietly(run).tokenizer

    environment["data"]["directory"] = str(trained_run().parents[1] / "data")
    (run / "environment.json").write_text(json.dumps(environment))
    assert load_quietly(run).tokenizer.fingerprint == loaded.tokenizer.fingerprint


def test_the_tokenizer_of_other_data_in_the_same_place_is_refused(tmp_path, capsys):
    run = copied_run(tmp_path)
    (run / "tokenizer.json").unlink(missing_ok=True)
    texts = write_texts(tmp_path / "texts", seed=1)
    other = tmp_path / "other"
    prepared = in_process(capsys, "data", "prepare", str(texts), "--vocab", "300", "--out", str(other))
    assert prepared.returncode == 0
    environment = json.loads((run / "environment.json").read_text())
    environment["data"]["directory"] = str(other)
    (run / "environment.json").write_text(json.dumps(environment))
    with pytest.raises(DataError, match="different shards"):
        _ = load_quietly(run).tokenizer


def test_a_tokenizer_with_other_ids_is_refused_also_by_export(tmp_path, capsys):
    run = copied_run(tmp_path)
    own = run / "tokenizer.json"
    content = json.loads(own.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [token for token, rank in vocabulary.items() if rank in (270, 271)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    own.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"the run .* was trained with; found another one"):
        _ = load_quietly(run).tokenizer
    complaint(in_process(capsys, "export", str(run), str(tmp_path / "exported"), "--device", "cpu"))
    assert not (tmp_path / "exported").exists()
    # A run from before the fingerprint was kept cannot be verified, and still loads.
    saved = store.load(store.latest(run / "checkpoints"))
    older = {key: value for key, value in saved.state.items() if key != "tokenizer"}
    store.save(run / "checkpoints", dataclasses.replace(saved, state=older), keep=1)
    assert load_quietly(run).tokenizer.vocab_size == 300


def test_a_tokenizer_larger_than_the_model_is_refused(loaded):
    config = updated(loaded.config, {"model.vocab_size": 290})
    smaller = LoadedModel(dataclasses.replace(loaded.stored, config=config), loaded.model, loaded.device)
    with pytest.raises(DataError, match="vocabulary of 290"):
        _ = smaller.tokenizer


def test_weights_of_another_shape_are_refused(tmp_path):
    run = copied_run(tmp_path)
    saved = store.load(store.latest(run / "checkpoints"))
    state = json.loads(json.dumps(saved.state))
    state["config"]["model"]["width"] = 128
    store.save(run / "checkpoints", store.Checkpoint(3, saved.tensors, state), keep=1)
    with pytest.raises(CheckpointError, match="match its configuration") as refusal:
        load_quietly(run)
    assert "\n" not in str(refusal.value)


def test_places_without_a_run_or_a_checkpoint_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        load_quietly(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_quietly(tmp_path)
    run = copied_run(tmp_path)
    shutil.rmtree(run / "checkpoints")
    for checkpoint in ("latest", "best"):
        with pytest.raises(CheckpointError, match="a checkpoint in"):
            load_quietly(run, checkpoint=checkpoint)


def test_unknown_devices_and_precisions_are_refused():
    with pytest.raises(DeviceError, match="abacus"):
        load(trained_run(), device="abacus")
    with pytest.raises(ConfigError, match="float16"):
        load_quietly(trained_run(), precision="float16")
