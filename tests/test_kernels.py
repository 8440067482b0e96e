"""The kernels of loss and Newton-Schulz against their references, on any number of threads."""

import pytest
import torch

from hotlap.kernels import chunked_loss
from hotlap.kernels.cpu import head, newton_schulz
from hotlap.kernels.cpu.muon_math import KernelMath
from hotlap.kernels.cpu.shares import chunk_tokens, least_tokens, token_parts
from hotlap.optim.newton_schulz import (
    GRAM_FIRST_SEGMENT,
    GRAM_SEGMENT,
    SMALLEST_NORM,
    orthogonalize,
    step_coefficients,
)
from tests.attention_cases import relative_error
from tests.kernels_here import needs_kernels

TOLERANCE = 2e-6  # of float32


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_head_agrees_with_plain_on_any_number_of_threads(threads, monkeypatch) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    monkeypatch.setattr(head, "CHUNK_LOGITS", 512 * 32)  # several chunks a thread, also on seven
    for num_tokens in (1, 5, 300):
        x, weight = torch.randn(num_tokens, 48), torch.randn(512, 48) / 7
        targets = torch.randint(0, 512, (num_tokens,))
        given = (targets, 15.0, 1 / num_tokens)
        expected = chunked_loss.loss_and_gradients(
            x.double(), weight.double(), *given, 512, needs_grad=True, passes="torch"
        )
        found = head.loss_and_gradients(x, weight, *given, needs_grad=True)
        for ours, plain in zip(found, expected, strict=True):
            assert relative_error(ours, plain) < TOLERANCE
        loss, *gradients = head.loss_and_gradients(x, weight, *given, needs_grad=False)
        assert loss == found[0]
        assert [gradient.numel() for gradient in gradients] == [0, 0]


@pytest.mark.parametrize(
    ("num_tokens", "most", "expected"),
    [
        (8192, 341, 316),
        (2048, 341, 256),  # not 341, which would leave one token to a last chunk
        (8192, 256, 256),
        (8192, 768, 683),
        (1100, 256, 184),
        (300, 256, 150),
        (0, 256, 1),
    ],
)
def test_chunks_of_two_threads_are_equal(num_tokens, most, expected) -> None:
    torch.set_num_threads(2)
    assert chunk_tokens(num_tokens, most) == expected


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 24, 24), (4, 12, 48), (3, 48, 12), (7, 16, 20)], ids=str)
@pytest.mark.parametrize("form", ["plain", "gram"])
def test_newton_schulz_agrees_with_plain_in_float64(form, shape, threads) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    matrices = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None, None]
    coefficients = step_coefficients("quintic", 5)
    segments = (GRAM_FIRST_SEGMENT, GRAM_SEGMENT) if form == "gram" else (1, 1)
    found = newton_schulz.orthogonalize(matrices, coefficients, *segments, SMALLEST_NORM)
    oracle = orthogonalize(matrices.double(), coefficients, form="plain")
    assert (found - oracle).abs().max() < 2e-5


@needs_kernels
def test_newton_schulz_of_zero_of_huge_and_of_what_is_not_a_number() -> None:
    torch.set_num_threads(2)
    coefficients = step_coefficients("polar-express", 5)
    matrices = torch.randn(4, 8, 16)
    matrices[0] = 0
    matrices[2, 3, 3] = float("nan")
    huge = torch.stack([matrices[0], matrices[1] * 1e30, matrices[2], matrices[3]])
    found = KernelMath().orthogonalize(huge, coefficients, torch.float32)
    assert found[0].eq(0).all()
    torch.testing.assert_close(found[1], orthogonalize(matrices, coefficients)[1], atol=1e-5, rtol=1e-5)
    assert found[2].isnan().all()
    assert found[[1, 3]].isfinite().all()


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "dtype", "in_c"),
    [
        ((2, 8, 8), torch.float32, True),
        ((1, 8, 8), torch.float32, False),  # a thread would have nothing to do
        ((2, 1024, 1024), torch.float32, False),  # would not fit a core's cache
        ((2, 8, 8), torch.bfloat16, False),
    ],
)
def test_newton_schulz_runs_in_c_where_each_thread_has_a_matrix_in_its_cache(
    shape, dtype, in_c, monkeypatch
) -> None:
    torch.set_num_threads(2)
    calls = []
    monkeypatch.setattr(newton_schulz, "orthogonalize", lambda matrices, *_: calls.append(matrices))
    KernelMath().orthogonalize(torch.ones(shape), step_coefficients("quintic", 1), dtype)
    assert bool(calls) == in_c


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (2, 512), (16, 4096)])
def test_a_kernel_pays_from_some_tokens_per_thread(threads, expected) -> None:
    torch.set_num_threads(threads)
    assert least_tokens(4096, 96) == expected
    assert least_tokens(768, 3072) == (1 if threads == 1 else threads * 768)


@pytest.mark.parametrize(("tokens", "parts"), [(768, 3), (767, 1), (765, 1), (1536, 3), (1, 1)])
def test_matmuls_are_cut_into_even_parts_that_are_not_too_short(tokens, parts) -> None:
    torch.set_num_threads(3)
    assert token_parts(torch.empty(tokens, 4)) == parts
    assert token_parts(torch.empty(tokens, 4, device="meta")) == 1
