"""The kernels in C against their references, on any number of threads, and what they leave to PyTorch."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hotlap.kernels.cpu import head, mlp, newton_schulz
from hotlap.kernels.cpu.shares import chunk_tokens
from hotlap.model import head as plain_head
from hotlap.model.head import softcapped_cross_entropy
from hotlap.model.layers import mix, plain_mix, plain_rms_norm, rms_norm
from hotlap.model.mlp import add_mlp, plain_add_mlp
from hotlap.model.rotary import Rotary, Rotation, norm_and_rotate, plain_norm_and_rotate
from hotlap.optim.newton_schulz import orthogonalize, step_coefficients
from tests.attention_cases import relative_error
from tests.kernels_here import needs_kernels

TOLERANCE = 2e-6  # of float32


@needs_kernels
@pytest.mark.parametrize(
    ("num_tokens", "threads", "in_c"),
    [(2048, 2, True), (512, 2, True), (511, 2, False), (2048, 16, False), (1, 1, True)],
)
def test_threads_with_few_tokens_each_share_no_gradients(num_tokens, threads, in_c) -> None:
    torch.set_num_threads(threads)
    for width, vocabulary in ((64, 512), (96, 4096)):  # of `pico` and `nano`
        x, expand = torch.empty(num_tokens, width), torch.empty(4 * width, width)
        assert mlp.suits(x, expand, expand.T) == in_c
        assert head.suits(x, torch.empty(vocabulary, width)) == in_c


@needs_kernels
def test_what_is_not_a_number_stays_so() -> None:
    x, weight, targets = torch.randn(9, 8), torch.randn(32, 8), torch.arange(9)
    x[3, 0] = float("nan")
    assert softcapped_cross_entropy(x, weight, targets, 15.0).isnan()
    y = add_mlp(x, torch.randn(16, 8), torch.randn(8, 16))
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4]].isfinite().all()


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
        expected = plain_head.loss_and_gradients(x.double(), weight.double(), *given, 512, needs_grad=True)
        found = head.loss_and_gradients(x, weight, *given, needs_grad=True)
        for ours, plain in zip(found, expected, strict=True):
            assert relative_error(ours, plain) < TOLERANCE
        loss, *gradients = head.loss_and_gradients(x, weight, *given, needs_grad=False)
        assert loss == found[0]
        assert [gradient.numel() for gradient in gradients] == [0, 0]


def result_and_gradients(
    function: Callable[..., Tensor], operands: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in operands]
    result = function(*leaves)
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad.to(dtype))]


def turned(x: Tensor, norm: Callable[[Tensor, Rotation], Tensor]) -> Tensor:
    rotation = Rotary(x.shape[-1], "half", 1024.0, len(x)).double().at(torch.arange(len(x)), torch.float64)
    return norm(x, Rotation(*(angles.to(x.dtype) for angles in rotation)))


# name: (fast, plain, shapes of the operands)
PASSES = {
    "norm": (rms_norm, plain_rms_norm, [(300, 48)]),
    "norm of one token": (rms_norm, plain_rms_norm, [(1, 7)]),
    "norm of a vector": (rms_norm, plain_rms_norm, [(48,)]),
    "norm of heads": (rms_norm, plain_rms_norm, [(60, 3, 16)]),
    "norm of batches of heads": (rms_norm, plain_rms_norm, [(4, 15, 3, 16)]),
    "rotation": (
        lambda x: turned(x, norm_and_rotate),
        lambda x: turned(x, plain_norm_and_rotate),
        [(300, 3, 16)],
    ),
    "mix": (mix, plain_mix, [(2,), (300, 48), (300, 48)]),
    "mix of heads": (mix, plain_mix, [(2,), (5, 3, 7), (5, 3, 7)]),
    "mix of three": (mix, plain_mix, [(3,), (300, 48), (300, 48), (300, 48)]),
}


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("case", PASSES)
def test_passes_agree_with_plain_on_any_number_of_threads(case, threads) -> None:
    torch.set_num_threads(threads)
    fast, plain, shapes = PASSES[case]
    torch.manual_seed(0)
    operands = [torch.randn(shape) for shape in shapes]
    found = result_and_gradients(fast, operands, torch.float32)
    for ours, oracle in zip(found, result_and_gradients(plain, operands, torch.float64), strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, oracle) < TOLERANCE


@needs_kernels
def test_passes_take_what_does_not_lie_together_and_rows_of_zeros() -> None:
    x = torch.randn(5, 6, 16)[:, :4]
    torch.testing.assert_close(rms_norm(x), plain_rms_norm(x))
    a, b, weights = torch.randn(16, 5).T, torch.randn(5, 16), torch.tensor([0.3, -2.0])
    torch.testing.assert_close(mix(weights, a, b), plain_mix(weights, a, b))
    apart = torch.tensor([0.3, 9.0, -2.0])[::2]
    torch.testing.assert_close(mix(apart, a, b), plain_mix(apart, a, b))
    assert rms_norm(torch.zeros(3, 8)).eq(0).all()


# name: (fast, plain, operands)
NOT_ALL_FIT = {
    "mix of shapes": (mix, plain_mix, [torch.randn(2), torch.randn(300, 48), torch.randn(48)]),
    "weights of shapes": (mix, plain_mix, [torch.randn(2, 48), torch.randn(300, 48), torch.randn(300, 48)]),
    "angles in bfloat16": (
        lambda x: norm_and_rotate(x, Rotation(*torch.randn(2, 300, 1, 8).bfloat16())),
        lambda x: plain_norm_and_rotate(x, Rotation(*torch.randn(2, 300, 1, 8).bfloat16())),
        [torch.randn(300, 3, 16)],
    ),
    "the same angles everywhere": (
        lambda x: norm_and_rotate(x, Rotation(*torch.randn(2, 1, 1, 8))),
        lambda x: plain_norm_and_rotate(x, Rotation(*torch.randn(2, 1, 1, 8))),
        [torch.randn(300, 3, 16)],
    ),
    "one matrix of an MLP in float64": (
        add_mlp,
        plain_add_mlp,
        [torch.randn(300, 16), torch.randn(64, 16) / 4, torch.randn(16, 64, dtype=torch.float64) / 8],
    ),
}


@needs_kernels
@pytest.mark.parametrize("case", NOT_ALL_FIT)
def test_an_operand_that_does_not_fit_sends_all_to_pytorch(case) -> None:
    fast, plain, operands = NOT_ALL_FIT[case]
    results = []
    for function in (fast, plain):
        torch.manual_seed(0)
        results.append(function(*operands))
    torch.testing.assert_close(*results)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("attended", [None, 48, 32])
def test_the_mlp_agrees_with_plain_on_any_number_of_threads(
    attended, num_tokens, threads, monkeypatch
) -> None:
    torch.set_num_threads(threads)
    monkeypatch.setattr(mlp, "CHUNK_FEATURES", 1)
    monkeypatch.setattr(mlp, "LEAST_CHUNK_TOKENS", 1)
    torch.manual_seed(0)
    operands = [torch.randn(num_tokens, 48), torch.randn(192, 48) / 7, torch.randn(48, 192) / 14]
    if attended:
        operands += [torch.randn(num_tokens, attended), torch.randn(48, attended) / 7]
    monkeypatch.setattr(mlp, "pays_to_share", lambda *_: True)
    assert mlp.suits(*operands)
    expected = result_and_gradients(plain_add_mlp, operands, torch.float64)
    for ours, plain in zip(result_and_gradients(add_mlp, operands, torch.float32), expected, strict=True):
        assert relative_error(ours, plain) < TOLERANCE


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
@pytest.mark.parametrize("attended", [None, 32])
def test_a_compiler_takes_the_mlp_as_it_is(attended) -> None:
    torch.compiler.reset()
    torch.set_num_threads(1)
    operands = [torch.randn(300, 48), torch.randn(192, 48) / 7, torch.randn(48, 192) / 14]
    if attended:
        operands += [torch.randn(300, attended), torch.randn(48, attended) / 7]
    assert mlp.suits(*operands)
    compiled = torch.compile(add_mlp, backend="aot_eager", fullgraph=True)
    expected = result_and_gradients(add_mlp, operands, torch.float32)
    for ours, eager in zip(result_and_gradients(compiled, operands, torch.float32), expected, strict=True):
        assert torch.equal(ours, eager)


@needs_kernels
def test_the_mlp_leaves_what_would_not_fit_a_cache_or_is_not_float32_to_pytorch() -> None:
    x, expand, out = torch.empty(4, 1024), torch.empty(4096, 1024), torch.empty(1024, 4096)
    torch.set_num_threads(1)
    small = x[:, :16], expand[:64, :16], out[:16, :64]
    assert mlp.suits(*small)
    assert not mlp.suits(x, expand, out)
    assert not mlp.suits(small[0][:0], *small[1:])  # no tokens, by which C is told of no attention
    assert not mlp.suits(*(operand.double() for operand in small))
    assert not mlp.suits(small[0].bfloat16(), *small[1:])
    assert not mlp.suits(*small[:2], small[2].double())


@needs_kernels
@pytest.mark.parametrize("attended", [((0,), (0,)), ((9, 4), (8, 4))])
def test_the_mlp_keeps_its_contract_with_the_compiler(attended) -> None:
    shapes = ((9, 8), *attended, (32, 8), (8, 32))
    torch.library.opcheck(
        torch.ops.hotlap.add_mlp.default,
        tuple(torch.randn(shape, requires_grad=True) for shape in shapes),
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_static",
        ),
    )


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 24, 24), (4, 12, 48), (3, 48, 12), (7, 16, 20)], ids=str)
@pytest.mark.parametrize("form", ["plain", "gram"])
def test_newton_schulz_agrees_with_plain_in_float64(form, shape, threads) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    matrices = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None, None]
    coefficients = step_coefficients("quintic", 5)
    assert newton_schulz.suits(matrices, torch.float32)
    found = orthogonalize(matrices, coefficients, form=form)
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
    found = orthogonalize(huge, coefficients)
    assert found[0].eq(0).all()
    torch.testing.assert_close(found[1], orthogonalize(matrices, coefficients)[1])
    assert found[2].isnan().all()
    assert found[[1, 3]].isfinite().all()


@needs_kernels
def test_newton_schulz_leaves_what_a_thread_could_not_have_to_itself_to_pytorch() -> None:
    torch.set_num_threads(2)
    assert not newton_schulz.suits(torch.empty(1, 8, 8), torch.float32)
    assert not newton_schulz.suits(torch.empty(2, 1024, 1024), torch.float32)
    assert not newton_schulz.suits(torch.empty(2, 8, 8), torch.bfloat16)
    assert newton_schulz.suits(torch.empty(2, 8, 8), torch.float32)
