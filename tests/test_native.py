"""Attention's kernels in C against the dense oracle, on any number of threads."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import first_visible_keys
from hotlap.kernels.cpu import attention
from hotlap.kernels.cpu.attention_backend import NativeBackend
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
from tests.kernels_here import needs_kernels

TOLERANCE = 2e-6  # of float32
THREADS = [1, 2, 3, 5]


def check_against_oracle(case: Case, threads: int) -> None:
    torch.set_num_threads(threads)
    found = output_and_gradients(NativeBackend(), case.mask(), *case.tensors())
    for name, ours, oracle in zip(("out", "q", "k", "v"), found, exact(case), strict=True):
        # A query that sees one key has no gradient; the kernels take the difference of two equal sums, of
        # up to 20 here.
        room = TOLERANCE * max(3.0, oracle.abs().max().item())
        assert (ours - oracle).abs().max() < room, (name, threads)


@needs_kernels
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_agrees_with_dense(case, threads) -> None:
    check_against_oracle(case, threads)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_native_agrees_with_dense_at_length(case) -> None:
    check_against_oracle(case, 2)


@needs_kernels
@given(random_cases(), st.sampled_from(THREADS))
@settings(max_examples=60, deadline=None)
def test_native_agrees_with_dense_on_random_documents(case, threads) -> None:
    check_against_oracle(case, threads)


@needs_kernels
def test_the_same_call_gives_the_same_bits() -> None:
    case = Case(1000, (301, 640), window=3, heads=(6, 2))
    torch.set_num_threads(3)
    first, second = (output_and_gradients(NativeBackend(), case.mask(), *case.tensors()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_kernels
def test_operands_may_be_views_of_one_projection() -> None:
    case = Case(384, (200,), 2, head_dim=16)
    q, k, v, grad = case.tensors()
    together = torch.cat((q, k, v), dim=1)
    transposed = v.transpose(0, 1).contiguous().transpose(0, 1)
    views = [x.requires_grad_() for x in (together[:, :2], together[:, 2:4], transposed)]
    backend = NativeBackend()
    out = backend.attend(*views, backend.plan(case.mask()), 16**-0.5)
    out.backward(grad)
    for ours, oracle in zip((out, *(x.grad for x in views)), exact(case), strict=True):
        assert relative_error(ours, oracle) < TOLERANCE


@needs_kernels
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_one_token_may_stand_for_all(num_tokens) -> None:
    q, k, v, _ = Case(num_tokens).tensors()
    # As expand() makes them, but for a single token, whose stride that leaves as it is.
    expanded = [q, *(x.as_strided(x.shape, (0, x.shape[2], 1)) for x in (k, v))]
    backend, plan = NativeBackend(), NativeBackend().plan(Case(num_tokens).mask())
    found = backend.attend(*expanded, plan, 0.2)
    assert torch.equal(found, backend.attend(*(x.contiguous() for x in expanded), plan, 0.2))
    torch.testing.assert_close(found, v[:1].expand(num_tokens, -1, -1))


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@needs_kernels
def test_the_default_dtype_does_not_matter(float64_by_default) -> None:
    case = Case(300, (100,), 2)
    operands = [x.float() for x in case.tensors()]
    found = output_and_gradients(NativeBackend(), case.mask(), *operands)
    expected = output_and_gradients(DenseBackend(), case.mask(), *(x.double() for x in operands))
    for ours, oracle in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, oracle) < TOLERANCE


@needs_kernels
def test_bfloat16_is_summed_in_float32() -> None:
    case = Case(512, (100,), 2)
    tensors = [x.bfloat16() for x in case.tensors()]
    found = output_and_gradients(NativeBackend(), case.mask(), *tensors)
    expected = output_and_gradients(DenseBackend(), case.mask(), *(x.double() for x in tensors))
    for ours, oracle in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, oracle) < 2**-7  # of the output, and of what is computed from it


@needs_kernels
def test_a_key_that_is_not_a_number_spoils_who_sees_it_and_nobody_else() -> None:
    case = Case(300, window=2)
    q, k, v, _ = case.tensors()
    k[200, 1, 3] = float("nan")
    backend = NativeBackend()
    out = backend.attend(q, k, v, backend.plan(case.mask()), 0.2)
    assert out[200:, 1].isnan().all()
    assert out[:200].isfinite().all()
    assert out[:, 0].isfinite().all()


@needs_kernels
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_twenty_windows_and_documents_recompile_nothing(compiler) -> None:
    check_compiled_block(NativeBackend(), compiler, TOLERANCE)


@needs_kernels
@pytest.mark.parametrize("head_dim", [32, 20])
def test_operators_keep_their_contract_with_the_compiler(head_dim) -> None:
    case = Case(200, (50,), 1, head_dim=head_dim)
    q, k, v, grad = case.tensors()
    first_key = first_visible_keys(case.mask())
    torch.library.opcheck(
        torch.ops.hotlap.native_attention.default,
        (*(x.requires_grad_() for x in (q, k, v)), first_key, 0.2),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    operands = [x.detach() for x in (q, k, v)]
    out, log_sums = torch.ops.hotlap.native_attention(*operands, first_key, 0.2)
    torch.library.opcheck(
        torch.ops.hotlap.native_attention_backward.default,
        (grad, *operands, first_key, out, log_sums, 0.2),
        test_utils=("test_schema", "test_faketensor"),
    )


@needs_kernels
def test_float64_is_refused() -> None:
    backend = NativeBackend()
    q, k, v, _ = (x.double() for x in Case(64).tensors())
    with pytest.raises(AssertionError, match="float32"):
        backend.attend(q, k, v, backend.plan(make_mask(64, (), 1, "blocks")), 1.0)


@needs_kernels
@pytest.mark.parametrize("head_dim", [1, 8, 20, 80])
def test_heads_of_any_size_agree_with_dense(head_dim) -> None:
    check_against_oracle(Case(300, (77,), 2, heads=(4, 2), head_dim=head_dim), threads=2)


@needs_kernels
def test_heads_that_lie_together_are_not_copied() -> None:
    x_HTD = torch.randn(3, 100, 64)
    assert attention._head_by_head(x_HTD.transpose(0, 1), 64).data_ptr() == x_HTD.data_ptr()
    x_THD = torch.randn(100, 3, 64)
    assert torch.equal(attention._head_by_head(x_THD, 64), x_THD.transpose(0, 1))
