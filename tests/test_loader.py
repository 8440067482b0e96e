import threading

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hotlap.data.loader import Loader
from hotlap.data.order import LoaderState
from hotlap.errors import ConfigError, DataError
from tests.token_data import stream_of

WORLD_SIZES = range(1, 9)


@st.composite
def settings_of_loaders(draw, order=None, tail=None):
    """A stream of random shards and a loader's settings that fit it."""
    order = order or draw(st.sampled_from(["stream", "shuffled"]))
    tail = tail or ("carry" if order == "shuffled" else draw(st.sampled_from(["carry", "drop"])))
    chunk_tokens = draw(st.integers(1, 4))
    sequence_tokens = chunk_tokens * draw(st.integers(1, 3))
    sequences = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 24]))
    batch_tokens = sequence_tokens * sequences
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    stream = stream_of(*lengths)
    fits = max(lengths) > batch_tokens if tail == "drop" else len(stream) > batch_tokens
    assume(fits)
    settings = {
        "batch_tokens": batch_tokens,
        "sequence_tokens": sequence_tokens,
        "order": order,
        "tail": tail,
        "chunk_tokens": chunk_tokens,
        "seed": draw(st.integers(0, 3)),
    }
    return stream, settings


def sequences_of(batch):
    """Each sequence of a batch as (inputs, targets)."""
    return list(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))


def global_steps(stream, settings, world_size, steps, state=None):
    """Per step, the sequences of all ranks in rank order."""
    loaders = [Loader(stream, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state(state)
    for _ in range(steps):
        yield [sequence for loader in loaders for sequence in sequences_of(loader.next())]
        assert len({loader.state for loader in loaders}) == 1


def dividing_world_sizes(settings):
    sequences = settings["batch_tokens"] // settings["sequence_tokens"]
    return [world_size for world_size in WORLD_SIZES if sequences % world_size == 0]


def flat(steps, which):
    return [token for step in steps for sequence in step for token in sequence[which]]


@given(settings_of_loaders(order="stream", tail="carry"), st.sampled_from(WORLD_SIZES))
def test_carry_makes_every_token_a_target_once_per_epoch_and_in_order(case, world_size):
    stream, settings = case
    assume(world_size in dividing_world_sizes(settings))
    size, epochs = len(stream), 3
    steps = -(-epochs * size // settings["batch_tokens"])
    batches = list(global_steps(stream, settings, world_size, steps))
    inputs, targets = flat(batches, 0), flat(batches, 1)
    for epoch in range(epochs):
        assert inputs[epoch * size : (epoch + 1) * size] == list(range(size))
        assert targets[epoch * size : (epoch + 1) * size] == [*range(1, size), 0]


def records_rule(stream, batch_tokens, epochs):
    """The plain loop over shards: yields (position, epoch, tokens dropped so far) at each batch."""
    dropped = 0
    for epoch in range(epochs):
        for start, end in zip(stream.starts.tolist(), stream.ends.tolist(), strict=True):
            position = start
            while position + batch_tokens + 1 <= end:
                yield position, epoch, dropped
                position += batch_tokens
            was_last_target = 1 if position > start else 0
            dropped += end - position - was_last_target


@given(settings_of_loaders(order="stream", tail="drop"))
def test_drop_follows_the_records_rule_and_counts_what_it_drops(case):
    stream, settings = case
    batch_tokens = settings["batch_tokens"]
    loader = Loader(stream, **settings)
    for position, epoch, dropped in records_rule(stream, batch_tokens, epochs=3):
        assert (loader.state, loader.tokens_dropped) == (LoaderState(position, epoch), dropped)
        batch = loader.next()
        assert batch.inputs.flatten().tolist() == list(range(position, position + batch_tokens))
        assert batch.targets.flatten().tolist() == list(range(position + 1, position + batch_tokens + 1))


@given(settings_of_loaders(order="shuffled"), st.sampled_from(WORLD_SIZES))
def test_shuffled_brings_every_chunk_once_per_epoch(case, world_size):
    stream, settings = case
    assume(world_size in dividing_world_sizes(settings))
    chunk_tokens = settings["chunk_tokens"]
    chunks = (len(stream) - 1) // chunk_tokens
    epochs = 3
    steps = -(-epochs * chunks * chunk_tokens // settings["batch_tokens"])
    batches = list(global_steps(stream, settings, world_size, steps))
    inputs = np.array(flat(batches, 0)).reshape(-1, chunk_tokens)
    targets = np.array(flat(batches, 1)).reshape(-1, chunk_tokens)
    assert np.array_equal(targets, inputs + 1)
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(chunk_tokens))
    for epoch in range(epochs):
        firsts = inputs[epoch * chunks : (epoch + 1) * chunks, 0]
        assert sorted(firsts.tolist()) == [chunk * chunk_tokens for chunk in range(chunks)]


@given(settings_of_loaders())
def test_the_union_over_ranks_is_the_same_for_every_world_size(case):
    stream, settings = case
    alone = list(global_steps(stream, settings, 1, 6))
    for world_size in dividing_world_sizes(settings):
        assert list(global_steps(stream, settings, world_size, 6)) == alone


@given(settings_of_loaders(), st.integers(0, 8), st.data())
def test_a_resume_continues_identically_also_on_another_world_size(case, step, data):
    stream, settings = case
    loader = Loader(stream, **settings)
    for _ in range(step):
        loader.next()
    state, counters = loader.state, (loader.tokens_served, loader.tokens_dropped)
    uninterrupted = [sequences_of(loader.next()) for _ in range(4)]
    world_size = data.draw(st.sampled_from(dividing_world_sizes(settings)))
    assert list(global_steps(stream, settings, world_size, 4, state)) == uninterrupted
    resumed = Loader(stream, **settings)
    resumed.load_state(state)
    assert (resumed.tokens_served, resumed.tokens_dropped) == counters
    assert resumed.tokens_served == step * settings["batch_tokens"]


@given(settings_of_loaders())
def test_a_thread_ahead_gives_the_same_batches_and_states(case):
    stream, settings = case
    plain, ahead = Loader(stream, **settings), Loader(stream, prefetch=True, **settings)
    try:
        for step in range(5):
            assert ahead.state == plain.state
            assert sequences_of(ahead.next()) == sequences_of(plain.next())
            if step == 2:
                for loader in (plain, ahead):
                    loader.load_state(Loader(stream, **settings).state)
    finally:
        ahead.close()


def test_sequences_are_shared_out_by_index():
    stream = stream_of(100)
    batch = Loader(stream, batch_tokens=24, sequence_tokens=4, rank=1, world_size=3).next()
    assert batch.inputs.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert batch.targets.tolist() == [[9, 10, 11, 12], [13, 14, 15, 16]]
    assert (batch.inputs.dtype, batch.targets.dtype) == (torch.int32, torch.int64)
    assert batch.chunk_tokens is None


def test_a_shuffled_batch_says_how_long_its_chunks_are():
    loader = Loader(stream_of(100), batch_tokens=16, sequence_tokens=8, order="shuffled", chunk_tokens=4)
    assert loader.next().chunk_tokens == 4
    assert loader.tokens_dropped_per_epoch == 3  # 24 chunks and the last one's target are 97 tokens


def test_each_epoch_has_an_order_of_its_own_and_the_seed_matters():
    def order_of(seed):
        loader = Loader(
            stream_of(101), batch_tokens=100, sequence_tokens=100, order="shuffled", chunk_tokens=1, seed=seed
        )
        return [tuple(loader.next().inputs.flatten().tolist()) for _ in range(3)]

    assert len({*order_of(0), *order_of(1)}) == 6
    assert order_of(0) == order_of(0)


def test_long_orders_cross_from_part_to_part(monkeypatch):
    settings = {"batch_tokens": 21, "sequence_tokens": 3, "order": "shuffled", "chunk_tokens": 3}
    whole = list(global_steps(stream_of(400), settings, 1, 15))
    monkeypatch.setattr("hotlap.data.order.PERMUTE_AT_ONCE", 5)
    from hotlap.data.order import _permuted_part

    _permuted_part.cache_clear()
    assert list(global_steps(stream_of(400), settings, 1, 15)) == whole
    _permuted_part.cache_clear()


class TestPrefetch:
    def loader(self):
        return Loader(stream_of(100), batch_tokens=8, sequence_tokens=8, prefetch=True)

    def test_the_next_batch_is_made_while_the_last_one_is_used(self, monkeypatch):
        loader = self.loader()
        made = threading.Semaphore(0)
        original = loader._host_batch

        def counted(state):
            batch = original(state)
            made.release()
            return batch

        monkeypatch.setattr(loader, "_host_batch", counted)
        loader.next()
        assert made.acquire(timeout=10)
        assert made.acquire(timeout=10), "the second batch is not being made"
        assert loader.state == LoaderState(8, 0)
        loader.close()

    def test_an_error_in_the_thread_surfaces_and_the_state_stays(self, monkeypatch):
        loader = self.loader()
        loader.next()
        loader.next()
        original = loader._order.read

        def broken(*arguments):
            raise OSError("disk gone")

        assert loader._prefetched is not None
        loader._prefetched.result()
        monkeypatch.setattr(loader._order, "read", broken)
        loader.next()  # made before
        with pytest.raises(OSError, match="disk gone"):
            loader.next()
        assert loader.state == LoaderState(24, 0)
        monkeypatch.setattr(loader._order, "read", original)
        assert loader.next().inputs[0, 0] == 24
        loader.close()

    def test_close_ends_the_thread(self):
        before = threading.active_count()
        loader = self.loader()
        loader.next()
        assert threading.active_count() == before + 1
        loader.close()
        assert threading.active_count() == before

    def test_without_a_gpu_there_is_no_thread(self):
        before = threading.active_count()
        loader = Loader(stream_of(100), batch_tokens=8, sequence_tokens=8)
        loader.next()
        loader.close()
        assert threading.active_count() == before


class TestBadInput:
    @pytest.mark.parametrize(
        "lengths, settings, message",
        [
            (
                (7,),
                {},
                r"at least 8 tokens in test, for one batch; found 7 in all; use fewer tokens per step",
            ),
            ((8,), {"order": "shuffled", "chunk_tokens": 2}, r"at least 9 tokens .*found 8 in all"),
            ((8, 8, 8), {"tail": "drop"}, r"at least 9 tokens .*found 8 in its longest shard"),
        ],
    )
    def test_fewer_tokens_than_one_batch(self, lengths, settings, message):
        with pytest.raises(DataError, match=message):
            Loader(stream_of(*lengths), batch_tokens=8, sequence_tokens=4, **settings)

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"world_size": 3}, r"a number of ranks that divides the 4 sequences of a step; found 3 ranks"),
            ({"world_size": 8}, r"divides the 4 sequences of a step; found 8 ranks"),
            ({"batch_tokens": 18}, r"a batch of whole sequences; found 18 tokens per step in sequences of 4"),
            ({"sequence_tokens": 0}, r"a batch of whole sequences"),
            ({"batch_tokens": 0}, r"a batch of whole sequences"),
            ({"tail": "keep"}, r"a loader's tail \(carry, drop\); found 'keep'"),
            ({"order": "random"}, r"a loader's order \(stream, shuffled\); found 'random'"),
            ({"order": "shuffled"}, r"chunks that divide a sequence of 4 tokens; found chunks of None"),
            ({"order": "shuffled", "chunk_tokens": 3}, r"divide a sequence of 4 tokens; found chunks of 3"),
            ({"order": "shuffled", "chunk_tokens": 0}, r"divide a sequence of 4 tokens; found chunks of 0"),
            ({"order": "shuffled", "tail": "drop", "chunk_tokens": 2}, r'"carry" with order "shuffled"'),
        ],
    )
    def test_settings_that_cannot_be(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            Loader(stream_of(100), **{"batch_tokens": 16, "sequence_tokens": 4, **settings})

    @pytest.mark.parametrize(
        "state, settings",
        [
            (LoaderState(100, 0), {}),
            (LoaderState(-1, 0), {}),
            (LoaderState(0, -1), {}),
            (LoaderState(1, 0), {"tail": "drop"}),
            (LoaderState(48, 0), {"tail": "drop"}),
            (LoaderState(3, 0), {"order": "shuffled", "chunk_tokens": 4}),
            (LoaderState(96, 0), {"order": "shuffled", "chunk_tokens": 4}),
        ],
    )
    def test_a_state_that_cannot_be_of_this_data_and_settings(self, state, settings):
        loader = Loader(stream_of(40, 60), batch_tokens=16, sequence_tokens=4, **settings)
        before = loader.state
        with pytest.raises(DataError, match=r"found position .*resume with the data"):
            loader.load_state(state)
        assert loader.state == before


def test_a_batch_stays_as_it_is_when_the_next_one_comes():
    loader = Loader(stream_of(100), batch_tokens=8, sequence_tokens=8)
    first, second = loader.next(), loader.next()
    assert first.inputs.tolist() == [list(range(8))]
    assert second.inputs.tolist() == [list(range(8, 16))]
