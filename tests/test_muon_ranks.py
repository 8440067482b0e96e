"""Muon on several ranks: the weights of one, state that moves between world sizes, and the overlap."""

import time

import pytest
import torch
import torch.distributed as dist

from hotlap.errors import OptimizerError
from hotlap.optim import Muon
from tests.ranks import RankError, run_ranks

# Counts of 5, 1 and 3 divide by none of 2 and 4, so some chunks are uneven on any number of ranks.
SHAPES = {"square": (5, 16, 16), "tall": (1, 48, 16), "wide": (3, 8, 24)}
PARTS = {"tall.0": 3}
FACTORS = {"square.3": 0.5}


def make_weights() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{kind}.{index}": torch.nn.Parameter(torch.randn(rows, cols, generator=generator))
        for kind, (count, rows, cols) in SHAPES.items()
        for index in range(count)
    }


def set_gradients(weights: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for weight in weights.values():
        # Depends on the weight as well, so that a wrong update shows in all later ones.
        weight.grad = torch.randn(weight.shape, generator=generator) + weight.detach()


def make_muon(weights, **options) -> Muon:
    return Muon(
        weights.items(), lr=0.05, momentum=0.9, weight_decay=0.1, parts=PARTS, lr_factors=FACTORS, **options
    )


def train(weights, optimizer, steps) -> dict[str, torch.Tensor]:
    for step in steps:
        set_gradients(weights, step)
        optimizer.step()
    return {name: weight.detach().clone() for name, weight in weights.items()}


def trained(rank, world_size, steps, options):
    weights = make_weights()
    optimizer = make_muon(weights, **options)
    result = train(weights, optimizer, range(steps))
    return result, optimizer.state_dict()["state"], optimizer.owners()


def resumed(rank, world_size, weights, state_dict):
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    optimizer = make_muon(parameters)
    optimizer.load_state_dict(state_dict)
    return train(parameters, optimizer, range(20, 30))


def trained_full_state(rank, world_size):
    weights = make_weights()
    optimizer = make_muon(weights)
    result = train(weights, optimizer, range(20))
    full = optimizer.full_state_dict()
    return result, full, train(weights, optimizer, range(20, 30))


def assert_same(one, other, tolerance) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=0, msg=name)


def trained_both_ways(rank, world_size, steps):
    return [
        trained(rank, world_size, steps, {"communication": communication})
        for communication in ("overlapped", "flat")
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_the_weights_of_one(world_size):
    alone, _, _ = trained(0, 1, 20, {})
    for results in run_ranks(trained_both_ways, world_size, 20):
        for weights, state, owners in results:
            assert_same(weights, alone, 1e-6)
            assert set(owners.values()) == set(range(world_size))
            assert len(state) < len(alone) or world_size == 1, "a rank keeps only the momentum it owns"


def trained_in_a_group_of_the_last_two(rank, world_size, steps):
    group = dist.new_group([1, 2])
    return None if rank == 0 else trained(rank, world_size, steps, {"process_group": group})


def test_a_process_group_can_have_some_of_the_ranks():
    alone, _, _ = trained(0, 1, 3, {})
    _, *results = run_ranks(trained_in_a_group_of_the_last_two, 3, 3)
    for weights, _, owners in results:
        assert_same(weights, alone, 1e-6)
        assert set(owners.values()) == {0, 1}


def trained_twice(rank, world_size, steps):
    return [trained(rank, world_size, steps, {}) for _ in range(2)]


def test_the_same_world_size_repeats_bit_for_bit():
    for (weights, state, _), (again, state_again, _) in run_ranks(trained_twice, 2, 5):
        assert all(torch.equal(weights[name], again[name]) for name in weights)
        assert all(torch.equal(state[name]["momentum"], state_again[name]["momentum"]) for name in state)


def test_each_momentum_has_one_owner_and_the_states_merge():
    results = run_ranks(trained, 3, 2, {})
    merged = {}
    for rank, (_, state, owners) in enumerate(results):
        assert not merged.keys() & state.keys()
        assert set(state) == {name for name, owner in owners.items() if owner == rank}
        merged |= state
    _, alone, _ = trained(0, 1, 2, {})
    assert merged.keys() == alone.keys()
    for name in merged:
        torch.testing.assert_close(merged[name]["momentum"], alone[name]["momentum"])


def test_state_saved_on_four_ranks_goes_on_with_one_two_or_three():
    results = run_ranks(trained_full_state, 4)
    weights, full, expected = results[0]
    for _, other, _ in results[1:]:
        assert all(
            torch.equal(full["state"][n]["momentum"], other["state"][n]["momentum"]) for n in full["state"]
        )
    assert_same(resumed(0, 1, weights, full), expected, 1e-6)
    for world_size in (2, 3, 4):
        for continued in run_ranks(resumed, world_size, weights, full):
            assert_same(continued, expected, 0 if world_size == 4 else 1e-6)


def traced(rank, world_size):
    events = []
    weights = make_weights()
    optimizer = make_muon(
        weights,
        on_event=lambda event, chunk: events.append((time.monotonic(), event, chunk)),
        gather_entries=1,
    )
    train(weights, optimizer, range(1))
    return events


def test_a_chunk_is_on_its_way_while_the_next_is_computed():
    for trace in run_ranks(traced, 2):
        assert [stamp for stamp, _, _ in trace] == sorted(stamp for stamp, _, _ in trace)
        order = [(event, chunk) for _, event, chunk in trace]
        last = max(chunk for _, chunk in order)
        assert last == 5, "chunks of two: three of squares, one tall, two wide"
        for chunk in range(last):
            started = order.index(("gather-start", chunk))
            next_begins = order.index(("compute", chunk + 1))
            next_ends = order.index(("gather-start", chunk + 1))
            waited = order.index(("wait", chunk))
            assert started < next_begins < next_ends < waited < order.index(("apply", chunk))


def computes_on_while_the_other_is_away(rank, world_size):
    """Rank 1 joins the first exchange only after rank 0 has begun to compute the second chunk."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 computes chunk 1"])

    def announce(event: str, chunk: int) -> None:
        if rank == 0 and (event, chunk) == ("compute", 1):
            store.set("rank 0 computes chunk 1", "")

    weights = make_weights()
    return train(weights, make_muon(weights, on_event=announce, gather_entries=1), range(1))


def test_the_exchange_does_not_block():
    # A gather that blocked would wait for rank 1, which waits for rank 0: it would never end.
    alone, _, _ = trained(0, 1, 1, {})
    for weights in run_ranks(computes_on_while_the_other_is_away, 2, timeout_seconds=30):
        assert_same(weights, alone, 1e-6)


def steps_with_nan(rank, world_size):
    weights = make_weights()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = make_muon(weights)
    set_gradients(weights, 0)
    weights["square.1"].grad[0, 0] = float("nan")
    try:
        optimizer.step()
    except OptimizerError as error:
        unchanged = all(torch.equal(before[name], weights[name]) for name in before)
        return str(error), unchanged
    return "", False


def test_all_ranks_refuse_a_nan_gradient_without_waiting_for_each_other():
    for message, unchanged in run_ranks(steps_with_nan, 2):
        assert "`square.1`" in message
        assert unchanged


def fails_on_rank_one(rank, world_size):
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()


def hangs_on_rank_zero(rank, world_size):
    if rank == 0:
        time.sleep(60)


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1 raised(.|\n)*fails_on_rank_one(.|\n)*on purpose"):
        run_ranks(fails_on_rank_one, 2)


def test_a_hanging_rank_is_reported():
    with pytest.raises(RankError, match=r"ranks \[0\] did not end in time"):
        run_ranks(hangs_on_rank_zero, 2, timeout_seconds=3, with_group=False)
