"""Bigram embeddings: what a pair adds, and that nothing comes from another document."""

from __future__ import annotations

import pytest
import torch

from hotlap.model.bigrams import BigramEmbedding, bigram_rows
from hotlap.recipes import resolve
from hotlap.settings import updated
from tests.tiny import made_up_tokens, make_masking, make_model

ROWS = [8192, 10_000, 3 * 4096, 4 * 8191, 65_536]


@pytest.mark.parametrize("num_rows", ROWS)
def test_pairs_with_a_token_in_common_have_rows_of_their_own(num_rows):
    one, others = torch.full((4096,), 17), torch.arange(-1, 4095)
    assert len(bigram_rows(one, others, num_rows).unique()) == 4096
    assert len(bigram_rows(others + 1, one, num_rows).unique()) == 4096


@pytest.mark.parametrize("num_rows", ROWS)
def test_pairs_that_are_close_have_rows_of_their_own(num_rows):
    side = int(num_rows**0.5 / 2)
    square = torch.cartesian_prod(torch.arange(300, 300 + side), torch.arange(500, 500 + side))
    assert len(bigram_rows(square[:, 0], square[:, 1], num_rows).unique()) == side**2


@pytest.mark.parametrize("num_rows", ROWS)
def test_pairs_fill_the_rows_evenly(num_rows):
    pairs = torch.cartesian_prod(torch.arange(1024), torch.arange(1024))
    counts = bigram_rows(pairs[:, 0], pairs[:, 1], num_rows).bincount(minlength=num_rows)
    assert len(counts) == num_rows
    mean = len(pairs) / num_rows
    assert 0.7 * mean < counts.min() <= counts.max() < 1.3 * mean


def test_both_tokens_and_their_order_choose_the_row():
    tokens, previous = torch.tensor([5, 6, 5, 6]), torch.tensor([6, 5, 5, -1])
    assert len(bigram_rows(tokens, previous, 4096).unique()) == 4


def test_a_fresh_table_adds_nothing_and_a_trained_one_its_rows():
    bigrams = BigramEmbedding(64, 8)
    tokens, previous = torch.tensor([3, 4]), torch.tensor([-1, 3])
    assert not bigrams(tokens, previous).any()
    torch.nn.init.normal_(bigrams.table.weight)
    expected = bigrams.table.weight[bigram_rows(tokens, previous, 64)]
    assert torch.equal(bigrams(tokens, previous), expected)


def test_no_token_learns_of_another_document():
    config = updated(resolve("softcap", "pico"), {"model.bigram_rows": 512})
    model, masking = make_model(config), make_masking(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens, _ = made_up_tokens(512, config.model.vocab_size)
    chunk_tokens = 256

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.hidden(tokens, masking.plans(tokens, chunk_tokens))

    changed = tokens.clone()
    changed[chunk_tokens - 1] = (tokens[chunk_tokens - 1] + 1) % config.model.vocab_size
    before, after = hidden(tokens), hidden(changed)
    assert torch.equal(before[chunk_tokens:], after[chunk_tokens:])
    assert not torch.equal(before[chunk_tokens - 1], after[chunk_tokens - 1])
