from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.data.permutation import permute


def everything(size, seed=0, epoch=0):
    return permute(np.arange(size, dtype=np.int64), size, seed, epoch)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 10**6))
def test_every_index_is_hit_once(size, seed, epoch):
    assert np.array_equal(np.sort(everything(size, seed, epoch)), np.arange(size))


@given(data=st.data(), size=st.integers(1, 10**12))
def test_an_index_goes_to_the_same_place_alone_and_in_company(data, size):
    indices = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64)
    alone = [int(permute(indices[i : i + 1], size, 3, 4)[0]) for i in range(len(indices))]
    together = permute(indices, size, 3, 4)
    assert together.tolist() == alone
    assert all(0 <= place < size for place in alone)


def test_seed_and_epoch_change_the_order():
    orders = {tuple(everything(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_is_the_same_in_every_version():
    # Runs resume from it: a change here would break them in silence.
    assert everything(12, seed=1, epoch=2).tolist() == [6, 8, 0, 2, 3, 5, 10, 4, 1, 7, 11, 9]


@pytest.mark.parametrize("size, orders", [(3, 6), (4, 24)])
def test_small_orders_are_all_about_equally_frequent(size, orders):
    counts = Counter(tuple(everything(size, 0, epoch)) for epoch in range(100 * orders))
    assert len(counts) == orders
    assert all(50 < count < 150 for count in counts.values())


def test_neighbours_are_torn_apart():
    order = everything(10_000)
    assert np.mean(np.abs(np.diff(order)) < 100) < 0.04  # 0.02 by chance
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
