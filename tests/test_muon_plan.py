"""Which rank computes which matrix, and what the ranks exchange: the plan, and the collectives of real steps.

The steps run on fake tensors and in a fake process group of any size, in which no rank waits for another.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from hotlap.model import build_model
from hotlap.optim import Muon
from hotlap.optim.chunks import Chunk, MatrixSpec, plan_chunks, plan_owners
from hotlap.optim.traffic import Collectives, muon_traffic
from hotlap.recipes import resolve
from hotlap.train.lap import route_parameters

RECIPES = ("softcap", "block-window")


def spec(rows: int, cols: int, parts: int = 1, group: int = 0) -> MatrixSpec:
    return MatrixSpec(rows, cols, parts, torch.float32, torch.device("cpu"), group)


def specs_of(recipe: str) -> list[MatrixSpec]:
    """Muon's matrices at `small`, without their memory."""
    config = resolve(recipe, "small")
    with torch.device("meta"):
        model = build_model(config.model, 128, torch.bfloat16)
    routes = route_parameters(model, config, world_size=1).routes
    return [MatrixSpec.of(route.tensor, route.parts) for route in routes if route.optimizer == "muon"]


def work_by_rank(specs: list[MatrixSpec], world_size: int) -> list[int]:
    work = [0] * world_size
    for matrix, owner in zip(specs, plan_owners(specs, world_size), strict=True):
        work[owner] += matrix.work
    return work


def assert_consistent(chunk: Chunk, specs: list[MatrixSpec], world_size: int) -> None:
    owned = [chunk.owned_by(rank) for rank in range(world_size)]
    assert [position for run in owned for position in run] == list(range(len(chunk.members)))
    assert all(chunk.owners[position] == rank for rank, run in enumerate(owned) for position in run)
    assert list(chunk.specs) == [specs[member] for member in chunk.members]
    assert len({(s.entries, s.work, s.dtype, s.device) for s in chunk.specs}) == 1
    for rank, run in enumerate(owned):
        stacks = chunk.stacks_of(rank)
        assert [position for stack in stacks for position in stack] == list(run)
        assert all(len({chunk.specs[position] for position in stack}) == 1 for stack in stacks)


@pytest.mark.parametrize("gather_entries", [1, 64, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 4, 7, 13])
def test_the_plan_gives_each_matrix_one_owner_and_shares_evenly(count, world_size, gather_entries):
    specs = [spec(4, 8), spec(8, 4)] * count + [spec(8, 8)] * 2
    chunks = plan_chunks(specs, world_size, gather_entries)
    assert sorted(index for chunk in chunks for index in chunk.members) == list(range(len(specs)))
    assert chunks[0].entries == 64, "the largest first"
    for chunk in chunks:
        assert_consistent(chunk, specs, world_size)
        counts = {len(chunk.owned_by(rank)) for rank in range(world_size)}
        if chunk.collective == "all-gather":
            assert len(counts) == 1
            assert world_size == 1 or counts.pop() <= max(1, gather_entries // chunk.entries)
        else:
            assert len(chunk.members) < world_size
    counts = Counter(plan_owners(specs, world_size)[: 2 * count])
    assert max(counts.values()) - min(counts[rank] for rank in range(world_size)) <= 2


def test_a_single_process_batches_equal_shapes_only():
    chunks = plan_chunks([spec(4, 8), spec(8, 4), spec(4, 8), spec(4, 8, group=1)], world_size=1)
    assert [chunk.members for chunk in chunks] == [(0, 2), (1,), (3,)]
    assert all(len(chunk.stacks_of(0)) == 1 for chunk in chunks)


def test_ranks_exchange_equal_element_counts_together_and_stack_equal_shapes():
    specs = [spec(4, 8), spec(8, 4)] * 3
    assert [chunk.members for chunk in plan_chunks(specs, 2, gather_entries=1)] == [(0, 2), (4, 1), (3, 5)]
    (together,) = plan_chunks(specs, 2, gather_entries=96)
    assert together.members == (0, 2, 4, 1, 3, 5)
    assert [together.stacks_of(rank) for rank in (0, 1)] == [[range(3)], [range(3, 6)]]


def test_remainders_go_to_the_rank_with_the_least_work():
    # One of the largest goes to rank 0. Each of the others is less work, so that none joins it there.
    owners = plan_owners([spec(16, 16), spec(8, 8), spec(4, 4), spec(2, 4)], world_size=2)
    assert owners == [0, 1, 1, 1]


def test_matrices_of_equal_element_count_but_different_work_are_shared_evenly():
    # A square has more work than an elongated matrix of as many entries.
    one, other = work_by_rank([spec(16, 16)] * 2 + [spec(4, 64)] * 2, world_size=2)
    assert one == other


# The largest over the smallest work of a rank. With 64 ranks, one matrix of an MLP has three times the
# work of a square, and no rank has more than that one.
@pytest.mark.parametrize(
    "world_size, balance", [(1, 1.0), (2, 1.0), (3, 1.03), (4, 1.0), (8, 1.08), (64, 3.0)]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_have_equal_work_at_small(recipe, world_size, balance):
    specs = specs_of(recipe)
    work = work_by_rank(specs, world_size)
    print(f"\n{recipe}, {world_size} ranks: work {max(work) / min(work):.3f}")
    assert max(work) <= balance * min(work)
    assert max(work) <= max(1.1 * sum(work) / world_size, max(matrix.work for matrix in specs))


class CountedCollectives(TorchDispatchMode):
    """Counts what reaches the process group: (operator, bytes that every rank has afterwards)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            result = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.calls.append((func.__name__, result.numel() * result.element_size()))
        return func(*args, **(kwargs or {}))

    def by_kind(self) -> list[Collectives]:
        kinds = {"_allgather_base_": "all-gather", "broadcast_": "broadcast", "allreduce_": "all-reduce"}
        found: dict[str, Collectives] = {}
        for name, size in self.calls:
            kind = kinds[name.partition(".")[0]]
            calls, total = found[kind][1:] if kind in found else (0, 0)
            found[kind] = Collectives(kind, calls + 1, total + size)
        return [found[kind] for kind in kinds.values() if kind in found]


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group in which every collective returns at once, and without the others' values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def collectives_of_a_step(specs: list[MatrixSpec], rank: int, world_size: int, **options: Any):
    with fake_group(rank, world_size), FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(matrix.rows, matrix.cols)) for matrix in specs]
        muon = Muon(weights, ns_dtype=torch.bfloat16, check_finite=False, **options)
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        with CountedCollectives() as counted:
            muon.step()
    return counted.by_kind()


def padded_bytes(specs: list[MatrixSpec], world_size: int) -> int:
    """Bytes with one all-gather per world-size matrices of a shape, padded, for comparison."""
    counts = Counter((matrix.rows, matrix.cols) for matrix in specs)
    return sum(
        -(-count // world_size) * world_size * rows * cols * 2 for (rows, cols), count in counts.items()
    )


@pytest.mark.parametrize("world_size", [2, 8, 64, 1024])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_collectives_of_a_step_are_those_of_the_formula(recipe, world_size):
    specs = specs_of(recipe)
    needed = sum(matrix.entries for matrix in specs) * 2
    expected = muon_traffic(specs, world_size, torch.bfloat16)
    for rank in (0, world_size - 1):
        assert collectives_of_a_step(specs, rank, world_size) == expected
    received = sum(collectives.bytes for collectives in expected)
    calls = ", ".join(f"{collectives.calls} {collectives.kind}" for collectives in expected)
    print(
        f"\n{recipe}, {world_size} ranks: {calls}, {received / 2**20:.1f} MiB of {needed / 2**20:.1f}; "
        f"padded {padded_bytes(specs, world_size) / 2**20:.0f}"
    )
    assert received == needed, "every rank receives every update once"


def test_the_formula_knows_the_flat_way_small_matrices_and_a_single_rank():
    specs = [spec(16, 16)] * 9 + [spec(8, 32)] * 2 + [spec(4, 4)]
    for options in ({"communication": "flat"}, {"gather_entries": 512}, {}):
        expected = muon_traffic(specs, 4, torch.bfloat16, **options)
        assert collectives_of_a_step(specs, 1, 4, **options) == expected
    assert muon_traffic(specs, 1, torch.bfloat16) == collectives_of_a_step(specs, 0, 1) == []
