"""Bigram embeddings: what a pair adds, and that nothing comes from another document."""

from __future__ import annotations

import pytest
import torch

from hotlap.model.bigrams import BigramEmbedding, bigram_rows
from hotlap.recipes import resolve
from hotlap.settings import updated
from tests.tiny import made_up_tokens, make_masking, make_model


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.randint(0, 4096, (2, 20_000), generator=torch.Generator().manual_seed(0))
    return tuple(pairs.unique(dim=1))


def one_token_before_all_others() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4096), torch.full((4096,), 17)


def one_token_after_all_others() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((4096,), 17), torch.arange(-1, 4095)


def pairs_at_a_fixed_distance() -> tuple[torch.Tensor, torch.Tensor]:
    return 71 * torch.arange(4096), 107 * torch.arange(4096)


@pytest.mark.parametrize("num_rows", [8192, 10_000, 3 * 4096, 4 * 8191])
@pytest.mark.parametrize(
    "pairs",
    [all_pairs, one_token_before_all_others, one_token_after_all_others, pairs_at_a_fixed_distance],
)
def test_pairs_spread_over_the_rows_as_by_chance(pairs, num_rows):
    tokens, previous = pairs()
    rows = bigram_rows(tokens, previous, num_rows)
    assert rows.min() >= 0
    assert rows.max() < num_rows
    expected = num_rows * (1 - (1 - 1 / num_rows) ** len(tokens))
    assert 0.95 * expected < len(rows.unique()) < 1.05 * expected


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
