"""Block lists and first visible keys against the dense mask, which is the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.attention.dense import visible_pairs
from hotlap.attention.mask import (
    WINDOW_UNITS,
    Mask,
    block_lists,
    document_ids,
    first_visible_keys,
    previous_tokens,
)
from tests.attention_cases import CASES, Case


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    block_size = draw(st.sampled_from([4, 8]))
    num_tokens = draw(st.integers(1, 12 * block_size))
    starts = draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    if draw(st.booleans()):  # long documents: full blocks appear
        starts = [start and position % 13 == 0 for position, start in enumerate(starts)]
    documents = torch.tensor(starts).cumsum(0, dtype=torch.int32)
    unit = draw(st.sampled_from(WINDOW_UNITS))
    window = torch.tensor(draw(st.integers(1, 13 if unit == "blocks" else 40)), dtype=torch.int32)
    return Mask(documents, window, unit, block_size)


def brute_force_blocks(mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, N) bool, live and full, by looking at every pair."""
    size, total = mask.block_size, len(mask.documents)
    num_blocks = -(-total // size)
    pairs = torch.zeros(num_blocks * size, num_blocks * size, dtype=torch.bool)
    pairs[:total, :total] = visible_pairs(mask)
    tiles = pairs.view(num_blocks, size, num_blocks, size).transpose(1, 2)
    return tiles.any(3).any(2), tiles.all(3).all(2)


def check_against_brute_force(mask: Mask) -> None:
    live, full = brute_force_blocks(mask)
    lists = block_lists(mask)
    for block in range(len(live)):
        partial = lists.partial_indices[block, : lists.partial_counts[block]].tolist()
        whole = lists.full_indices[block, : lists.full_counts[block]].tolist()
        assert whole == full[block].nonzero()[:, 0].tolist()
        assert partial == (live & ~full)[block].nonzero()[:, 0].tolist()


@given(masks())
@settings(max_examples=150, deadline=None)
def test_block_lists_equal_brute_force_on_random_masks(mask: Mask) -> None:
    check_against_brute_force(mask)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_lists_equal_brute_force(case: Case) -> None:
    check_against_brute_force(case.mask())


@given(masks())
@settings(max_examples=100, deadline=None)
def test_first_visible_key_and_the_query_bound_what_is_visible(mask: Mask) -> None:
    positions = torch.arange(len(mask.documents))
    first = first_visible_keys(mask)
    interval = (positions >= first[:, None]) & (positions <= positions[:, None])
    assert torch.equal(interval, visible_pairs(mask))
    assert bool((first.diff() >= 0).all())


def test_lists_keep_their_shape_and_type_whatever_the_window() -> None:
    documents = torch.zeros(600, dtype=torch.int32)
    for window in (1, 2, 9):
        lists = block_lists(Mask(documents, torch.tensor(window, dtype=torch.int32), "blocks"))
        assert [tuple(x.shape) for x in lists] == [(5,), (5, 5), (5,), (5, 5)]
        assert all(x.dtype == torch.int32 for x in lists)


def test_document_ids_count_the_end_of_text_token() -> None:
    tokens = torch.tensor([9, 1, 2, 9, 9, 3])
    assert document_ids(tokens, 9).tolist() == [1, 1, 1, 2, 3, 3]
    assert document_ids(tokens, 9).dtype == torch.int32


def test_chunk_boundaries_start_documents_too() -> None:
    tokens = torch.tensor([1, 1, 9, 1, 9, 1, 1])
    # A boundary that is also an end-of-text token starts one document, not two.
    assert document_ids(tokens, 9, chunk_tokens=2).tolist() == [1, 1, 2, 2, 3, 3, 4]


def test_the_previous_token_is_that_of_the_same_document() -> None:
    tokens = torch.tensor([7, 8, 0, 9, 9, 0, 0, 5])
    documents = document_ids(tokens, end_of_text=0)
    assert previous_tokens(tokens, documents).tolist() == [-1, 7, -1, 0, 9, -1, -1, 0]


@pytest.mark.parametrize(
    "documents, window, unit",
    [
        (torch.tensor([0, 1, 0], dtype=torch.int32), 1, "tokens"),
        (torch.tensor([0, 1]), 1, "tokens"),
        (torch.zeros(2, 2, dtype=torch.int32), 1, "tokens"),
        (torch.zeros(0, dtype=torch.int32), 1, "tokens"),
        (torch.zeros(3, dtype=torch.int32), 0, "tokens"),
        (torch.zeros(3, dtype=torch.int32), 1, "pages"),
    ],
    ids=["decreasing", "int64", "matrix", "empty", "no-window", "unit"],
)
def test_a_mask_that_breaks_its_contract_is_refused(documents: torch.Tensor, window: int, unit: str) -> None:
    with pytest.raises(AssertionError):
        Mask(documents, torch.tensor(window, dtype=torch.int32), unit)
