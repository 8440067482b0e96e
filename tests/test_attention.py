"""The blocked backend against the dense oracle, forward and backward, eager and compiled."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotlap.attention.blocked import BlockedBackend
from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import first_visible_keys
from hotlap.attention.tiles import TILE, batches, plan_runs
from hotlap.errors import ConfigError, DeviceError
from hotlap.kernels import choose_backend
from tests.attention_cases import (
    CASES,
    LONG_CASES,
    Case,
    check_compiled_block,
    exact,
    make_mask,
    output_and_gradients,
    random_cases,
    relative_error,
)
from tests.kernels_here import without_kernels

TOLERANCE = 2e-6  # of float32; the worst seen is 7e-7, the oracle's own in float32 too
BUDGETS = {"saved": 2**40, "partly": 3 * 2**18, "recomputed": 0}

# Importing the compiler warns about its own use of torch.jit.
compiles = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def check_against_oracle(case: Case) -> None:
    expected = exact(case)
    for budget in BUDGETS.values():
        found = output_and_gradients(BlockedBackend(budget), case.mask(), *case.tensors())
        for name, ours, oracle in zip(("out", "q", "k", "v"), found, expected, strict=True):
            assert relative_error(ours, oracle) < TOLERANCE, (name, budget)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocked_agrees_with_dense(case: Case) -> None:
    check_against_oracle(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_blocked_agrees_with_dense_at_length(case: Case) -> None:
    check_against_oracle(case)


@given(random_cases(), st.sampled_from(list(BUDGETS.values())))
@settings(max_examples=40, deadline=None)
def test_blocked_agrees_with_dense_on_random_documents(case: Case, budget: int) -> None:
    found = output_and_gradients(BlockedBackend(budget), case.mask(), *case.tensors())
    for ours, oracle in zip(found, exact(case), strict=True):
        assert (ours - oracle).abs().max() < 5 * TOLERANCE * max(1.0, oracle.abs().max().item())


@pytest.mark.parametrize("unit, window", [("blocks", 1), ("tokens", 100), ("tokens-and-blocks", 100)])
@pytest.mark.parametrize("budget", [0, 2**30])
def test_gradcheck(unit, window, budget) -> None:
    mask = make_mask(150, (40, 139), window, unit)
    backend = BlockedBackend(budget)
    plan = backend.plan(mask)
    q = torch.randn(150, 2, 2, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(150, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda *qkv: backend.attend(*qkv, plan, 0.7), (q, k, v), fast_mode=True, atol=1e-7
    )


def test_every_pair_of_tile_and_head_is_done_once_and_batched_keys_are_disjoint() -> None:
    for case in CASES:
        query_heads, kv_heads = case.heads
        runs = plan_runs(first_visible_keys(case.mask()), torch.float32, torch.device("cpu"))
        num_tiles = -(-case.num_tokens // TILE)
        done = np.zeros((num_tiles, kv_heads), dtype=int)
        for batch in batches(runs, kv_heads, query_heads // kv_heads):
            assert 1 in (batch.num_tiles, batch.num_kv_heads)
            assert batch.num_tiles == 1 or batch.run.stride >= batch.run.num_keys
            assert batch.first_key >= 0
            first, step = batch.first_query // TILE, batch.run.stride // TILE
            tiles = slice(first, first + (batch.num_tiles - 1) * step + 1, step)
            done[tiles, batch.first_kv_head : batch.first_kv_head + batch.num_kv_heads] += 1
        assert (done == 1).all(), case


def test_equal_documents_make_few_batches() -> None:
    mask = make_mask(4096, tuple(range(256, 4096, 256)), 2, "blocks")
    runs = plan_runs(first_visible_keys(mask), torch.float32, torch.device("cpu"))
    assert [(run.num_tiles, run.num_keys) for run in runs] == [(16, 128), (16, 256)]
    assert len(batches(runs, num_kv_heads=2, heads_per_kv=1)) == 4


def saved_bytes(backend: BlockedBackend, q: Tensor, k: Tensor, v: Tensor, plan: object) -> int:
    """What autograd keeps besides the operands."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        backend.attend(q, k, v, plan, 1.0)
    operands = {x.untyped_storage().data_ptr() for x in (q, k, v, plan.first_key)}
    return sum(size for storage, size in kept.items() if storage not in operands)


def test_saved_probabilities_stay_within_the_budget() -> None:
    case = Case(1024, window=3)
    q, k, v, _ = (x.requires_grad_() for x in case.tensors())
    plan = BlockedBackend().plan(case.mask())
    everything = 2 * 128 * 128 * 4 * (1 + 2 + 6 * 3)  # heads, one block pair, bytes, pairs
    assert saved_bytes(BlockedBackend(2**30), q, k, v, plan) == everything
    assert 0 < saved_bytes(BlockedBackend(everything // 2), q, k, v, plan) <= everything // 2
    assert saved_bytes(BlockedBackend(0), q, k, v, plan) == 0


def test_without_gradients_nothing_is_saved(monkeypatch) -> None:
    budgets = []
    original = torch.ops.hotlap.blocked_attention
    monkeypatch.setattr(
        "hotlap.attention.blocked._forward", lambda *args: budgets.append(args[-1]) or original(*args)
    )
    case, backend = Case(256), BlockedBackend()
    q, k, v, _ = case.tensors()
    plan = backend.plan(case.mask())
    backend.attend(q, k, v, plan, 1.0)
    with torch.no_grad():
        backend.attend(q.requires_grad_(), k, v, plan, 1.0)
    assert budgets == [0, 0]
    assert backend.attend(q, k, v, plan, 1.0).requires_grad
    assert budgets[-1] > 0


def test_several_forwards_before_their_backwards() -> None:
    cases = [Case(640, (100,), 2), Case(640, (300, 512), 500, "tokens"), Case(640, (), 1)]
    backend = BlockedBackend()
    leaves, outs = [], []
    for seed, case in enumerate(cases):
        q, k, v, grad = case.tensors(seed)
        qkv = [x.requires_grad_() for x in (q, k, v)]
        leaves.append(qkv)
        outs.append((backend.attend(*qkv, backend.plan(case.mask()), 32**-0.5), grad))
    for out, grad in outs:
        out.backward(grad)
    for seed, case in enumerate(cases):
        expected = output_and_gradients(DenseBackend(), case.mask(), *case.tensors(seed))
        for leaf, oracle in zip(leaves[seed], expected[1:], strict=True):
            assert relative_error(leaf.grad, oracle) < TOLERANCE


def test_operands_may_be_views_of_one_projection() -> None:
    case = Case(384, (200,), 2, head_dim=16)
    q, k, v, grad = case.tensors()
    together = torch.stack((q, k, v), dim=1)
    views = [x.requires_grad_() for x in together.unbind(1)]
    assert not views[1].is_contiguous()
    backend = BlockedBackend()
    out = backend.attend(*views, backend.plan(case.mask()), 16**-0.5)
    out.backward(grad)
    expected = exact(case)
    for ours, oracle in zip((out, *(x.grad for x in views)), expected, strict=True):
        assert relative_error(ours, oracle) < TOLERANCE


def test_bfloat16_is_summed_in_float32() -> None:
    case = Case(512, (100,), 2)
    tensors = [x.bfloat16() for x in case.tensors()]
    found = output_and_gradients(BlockedBackend(), case.mask(), *tensors)
    expected = output_and_gradients(DenseBackend(), case.mask(), *(x.double() for x in tensors))
    for ours, oracle in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, oracle) < 2**-8  # one rounding, at the end


@compiles
def test_twenty_windows_and_documents_recompile_nothing() -> None:
    check_compiled_block(BlockedBackend(2**17), "aot_eager", TOLERANCE)


@compiles
@pytest.mark.slow
def test_twenty_windows_and_documents_recompile_nothing_with_the_full_compiler() -> None:
    check_compiled_block(BlockedBackend(2**17), "inductor", TOLERANCE)


def test_operators_keep_their_contract_with_the_compiler() -> None:
    case = Case(200, (50,), 1)
    q, k, v, grad = (x.requires_grad_() for x in case.tensors())
    first_key = first_visible_keys(case.mask())
    for budget in (0, 2**30):
        torch.library.opcheck(
            torch.ops.hotlap.blocked_attention.default,
            (q, k, v, first_key, 0.2, budget),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
    saved = torch.empty(0)
    torch.library.opcheck(
        torch.ops.hotlap.blocked_attention_backward.default,
        (*(x.detach() for x in (grad, q, k, v)), first_key, saved, 0.2),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    "name, device, expected",
    [
        ("auto", "cpu", "blocked"),
        ("auto", "mps", "blocked"),
        ("auto", "cuda", "flex"),
        ("dense", "cpu", "dense"),
        ("blocked", "cuda", "blocked"),
    ],
)
def test_choose_backend(name, device, expected, monkeypatch) -> None:
    without_kernels(monkeypatch)
    assert choose_backend(name, device).name == expected


def test_native_is_refused_where_it_cannot_be(monkeypatch) -> None:
    with pytest.raises(DeviceError, match=r"a CPU.*found device cuda.*blocked"):
        choose_backend("native", "cuda")
    without_kernels(monkeypatch)
    with pytest.raises(DeviceError, match=r"gcc.*found left out by a test.*blocked"):
        choose_backend("native", "cpu")


def test_flex_is_refused_where_it_cannot_train() -> None:
    with pytest.raises(DeviceError, match=r"CUDA.*found device cpu.*blocked"):
        choose_backend("flex", "cpu")


def test_an_unknown_backend_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"auto, dense, flex, native, blocked; found 'fast'"):
        choose_backend("fast", "cpu")


def test_shapes_that_do_not_fit_are_refused() -> None:
    backend = BlockedBackend()
    plan = backend.plan(make_mask(64, (), 1, "blocks"))
    q, k, v = torch.zeros(64, 3, 8), torch.zeros(64, 2, 8), torch.zeros(64, 2, 8)
    with pytest.raises(AssertionError, match="3 query heads"):
        backend.attend(q, k, v, plan, 1.0)
    with pytest.raises(AssertionError, match="a plan for 64 tokens"):
        backend.attend(q[:32], k[:32, :1], v[:32, :1], plan, 1.0)
