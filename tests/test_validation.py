import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotlap.data.validation import validation_batches
from hotlap.errors import ConfigError, DataError
from tests.token_data import stream_of


@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    world_size=st.integers(1, 5),
    block_tokens=st.integers(1, 4),
    sequence_blocks=st.integers(1, 5),
)
def test_all_ranks_together_give_the_start_of_the_split_every_time(
    data, lengths, world_size, block_tokens, sequence_blocks
):
    stream = stream_of(*lengths, block_tokens + 1)
    blocks = (len(stream) - 1) // block_tokens
    asked = data.draw(st.none() | st.integers(1, blocks).map(lambda count: count * block_tokens))
    expected = blocks * block_tokens if asked is None else asked
    sequence_tokens = sequence_blocks * block_tokens
    ranks = [
        validation_batches(stream, asked, sequence_tokens, rank, world_size, block_tokens=block_tokens)
        for rank in range(world_size)
    ]
    for batches in ranks:
        assert batches.tokens == expected
        assert batches.tokens_left_out == len(stream) - 1 - expected
        again = [(batch.inputs.tolist(), batch.targets.tolist()) for batch in batches]
        assert [(batch.inputs.tolist(), batch.targets.tolist()) for batch in batches] == again
        assert len(again) == len(batches)
    seen = sorted(
        (batch.inputs.flatten().tolist(), batch.targets.flatten().tolist())
        for batches in ranks
        for batch in batches
    )
    inputs = [token for sequence, _ in seen for token in sequence]
    targets = [token for _, sequence in seen for token in sequence]
    assert inputs == list(range(expected))
    assert targets == list(range(1, expected + 1))
    assert all(len(sequence) == sequence_tokens for sequence, _ in seen[:-1])


def test_shapes_and_types():
    (batch,) = validation_batches(stream_of(300), None, 256)
    assert (batch.inputs.shape, batch.inputs.dtype) == ((1, 256), torch.int32)
    assert (batch.targets.shape, batch.targets.dtype) == ((1, 256), torch.int64)
    assert batch.chunk_tokens is None


def test_less_than_a_block_is_left_out():
    batches = validation_batches(stream_of(1000), None, 512)
    assert (batches.tokens, batches.tokens_left_out) == (896, 103)
    assert [batch.inputs.shape[1] for batch in batches] == [512, 384]


def test_a_split_with_fewer_tokens_than_asked_for():
    with pytest.raises(DataError, match=r"at least 513 tokens in test, to validate on 512; found 512"):
        validation_batches(stream_of(512), 512, 256)


def test_a_split_with_fewer_tokens_than_a_block():
    with pytest.raises(DataError, match=r"at least 129 tokens in test, to validate on 128; found 128"):
        validation_batches(stream_of(128), None, 256)


@pytest.mark.parametrize("tokens", [0, -128, 100])
def test_a_number_of_tokens_that_is_no_multiple_of_a_block(tokens):
    with pytest.raises(ConfigError, match=rf"validation tokens as a multiple of 128; found {tokens}"):
        validation_batches(stream_of(512), tokens, 256)


def test_a_sequence_that_is_no_multiple_of_a_block():
    with pytest.raises(
        ConfigError, match=r"a validation sequence length that is a multiple of 128 tokens; found 200"
    ):
        validation_batches(stream_of(512), None, 200)


@pytest.mark.parametrize("most_tokens, expected", [(1, 1), (256, 1), (700, 2), (1280, 5), (10_000, 5)])
def test_a_part_is_spread_over_the_split_and_the_rest_is_the_rest(most_tokens, expected):
    for world_size in (1, 2, 3):
        seen = []
        for rank in range(world_size):
            whole = validation_batches(stream_of(1300), None, 256, rank, world_size)
            parts = whole.split(most_tokens)
            seen.append([[int(batch.inputs[0, 0]) for batch in part] for part in parts])
        part, rest = (sorted(start for ranks in seen for start in ranks[i]) for i in range(2))
        assert len(part) == expected
        assert sorted(part + rest) == list(range(0, 1280, 256))
        assert sum(one.tokens for one in parts) == whole.tokens
    if expected == 2:
        assert part == [256, 768]
