"""Log-likelihoods of packed texts equal those of each text alone, for every kind of window."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from hotlap.harness.scoring import Request, score, windows
from hotlap.inference.load import LoadedModel, Stored, load
from hotlap.model import build_model
from hotlap.recipes import resolve
from tests.trained_run import trained_run


@functools.cache
def made_up(recipe: str) -> LoadedModel:
    """A model with random weights in every part, also in those that start as zero."""
    trained = load(trained_run(), device="cpu")
    config = resolve(recipe, "pico", {"model.vocab_size": 300})
    torch.manual_seed(0)
    model = build_model(config.model, config.batch.sequence_tokens)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    stored = replace(trained.stored, config=config, step=config.schedule.steps)
    assert isinstance(stored, Stored)
    return LoadedModel(stored, model.requires_grad_(False), torch.device("cpu"))


def texts(loaded: LoadedModel) -> list[Request]:
    """Of many lengths, one longer than every window."""
    generator = torch.Generator().manual_seed(1)
    end, known = loaded.tokenizer.end_of_text, loaded.tokenizer.vocab_size
    requests = []
    for length, first in ((20, 5), (400, 1), (3, 3), (130, 129), (1, 1), (64, 40)):
        drawn = torch.randint(1, known, (length,), generator=generator).tolist()
        requests.append(Request([end, *drawn], first))
    return requests


def expected(loaded: LoadedModel, request: Request) -> tuple[float, bool]:
    logits = loaded.logits(request.ids[:-1])[request.first - 1 :, : loaded.tokenizer.vocab_size]
    targets = torch.tensor(request.ids[request.first :])
    found = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
    return float(found.double().sum()), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("recipe", ["softcap", "block-window", "unet-value-embeds", "sprint", "adamw"])
def test_packed_texts_have_the_log_likelihoods_of_each_alone(recipe):
    loaded = made_up(recipe)
    requests = texts(loaded)
    wanted = [expected(loaded, request) for request in requests]
    for at_once in (1, 4):
        found = list(score(loaded, requests, at_once))
        for one, (log_likelihood, is_greedy) in zip(found, wanted, strict=True):
            assert one.log_likelihood == pytest.approx(log_likelihood, rel=1e-5, abs=1e-4)
            assert one.is_greedy == is_greedy


def test_the_likeliest_continuation_is_greedy():
    loaded = made_up("softcap")
    ids = [loaded.tokenizer.end_of_text]
    for _ in range(3):
        ids.append(int(loaded.logits(ids)[-1, : loaded.tokenizer.vocab_size].argmax()))
    (found,) = score(loaded, [Request(ids, 1)])
    assert found.is_greedy


def test_nothing_to_score_scores_nothing():
    loaded = made_up("softcap")
    (found,) = score(loaded, [Request([loaded.tokenizer.end_of_text], 1)])
    assert (found.log_likelihood, found.is_greedy) == (0.0, True)


def test_windows_score_each_token_once_with_all_the_context_that_fits():
    ids = list(range(11))
    parts = list(windows(Request(ids, 1), 4))
    assert [part.ids for part in parts] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [6, 7, 8, 9, 10]]
    assert [part.ids[part.first :] for part in parts] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert list(windows(Request(ids, 9), 4)) == [Request([6, 7, 8, 9, 10], 3)]
    assert list(windows(Request(ids[:4], 2), 4)) == [Request([0, 1, 2, 3], 2)]


def test_a_text_longer_than_gpt2s_context_is_scored_in_windows():
    loaded = made_up("adamw")
    context = loaded.model.max_tokens
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(1, loaded.tokenizer.vocab_size, (context + 100,), generator=generator).tolist()
    request = Request([loaded.tokenizer.end_of_text, *drawn], 1)
    parts = [expected(loaded, part) for part in windows(request, context)]
    assert len(parts) == 2
    (found,) = score(loaded, [request])
    assert found.log_likelihood == pytest.approx(sum(part[0] for part in parts), rel=1e-5)
