"""`model.dropout`: in training only, and the same when a run is resumed."""

import shutil

import pytest
import torch

from hotlap.errors import ConfigError
from hotlap.recipes import resolve
from tests.tiny import made_up_tokens, make_masking, make_model
from tests.training import losses, pico, train

WITH = {"model.dropout": 0.5}


def test_it_changes_training_and_leaves_evaluation_alone():
    plain, dropping = (make_model(resolve("sprint", "pico", changes)) for changes in ({}, WITH))
    config = resolve("sprint", "pico", WITH)
    tokens, targets = made_up_tokens(config.batch.sequence_tokens, config.model.vocab_size)
    plans = make_masking(config).plans(tokens, None)
    # The head starts at zero, where whatever is dropped gives the same loss.
    torch.manual_seed(1)
    weight = torch.randn_like(plain.head.weight)
    for model in (plain, dropping):
        model.head.weight.data.copy_(weight)
    first, second = (dropping(tokens, targets, plans).item() for _ in range(2))
    assert first != second
    with torch.no_grad():
        assert dropping(tokens, targets, plans).item() == plain(tokens, targets, plans).item()
    dropping.eval()
    assert dropping(tokens, targets, plans).item() == pytest.approx(plain(tokens, targets, plans).item())


def test_a_resumed_run_drops_what_it_would_have_dropped(tiny_data, tmp_path):
    config = pico(tiny_data, 4, model__dropout=0.5)
    train(config, tmp_path, "whole")
    halves = pico(tiny_data, 4, model__dropout=0.5, checkpoint__every_steps=2)
    train(halves, tmp_path, "halves")
    run = tmp_path / "halves"
    for kept in (run / "checkpoints").glob("step-000004*"):
        shutil.rmtree(kept)
    train(halves, tmp_path, "halves", resume=True)
    assert losses(run) == losses(tmp_path / "whole")


@pytest.mark.parametrize(
    ("recipe", "changes", "expected"),
    [
        ("adamw", WITH, "dropout 0, because gpt2 supports none of them"),
        ("sprint", {**WITH, "runtime.reduction": "fixed"}, "model.dropout of 0 with runtime.reduction fixed"),
        ("sprint", {"model.dropout": 1.0}, r"`dropout` in \[0, 1\)"),
    ],
)
def test_where_it_cannot_work_it_is_refused(recipe, changes, expected):
    with pytest.raises(ConfigError, match=expected):
        resolve(recipe, "pico", changes)
