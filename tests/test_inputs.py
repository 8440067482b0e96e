"""From the residual stream to attention's operands, with kernels and without, against the plain version."""

import pytest
import torch
from hotlap.model.inputs import inputs, plain_inputs
from torch import Tensor

from hotlap.kernels.cpu import inputs as kernel
from hotlap.model.rotary import Rotary, Rotation
from tests.attention_cases import relative_error
from tests.kernels_here import needs_kernels, without_kernels

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 4, 2, 12, 20
TOLERANCE = 3e-6  # of float32
NAMES = (
    "mixed",
    "q",
    "k",
    "v",
    "x0 again",
    "x",
    "x0",
    "skip",
    "stream mix",
    "of q",
    "of k",
    "of v",
    "value mix",
    "mixed in",
)


def operands(num_tokens: int) -> list[Tensor]:
    """The stream, the embedding, a skip connection, their mix, three weights, value mix, what is mixed in."""
    generator = torch.Generator().manual_seed(0)
    stream, features = (num_tokens, WIDTH), KV_HEADS * HEAD_DIM
    weights = [(HEADS * HEAD_DIM, WIDTH), (features, WIDTH), (features, WIDTH)]
    shapes = [stream, stream, stream, (3,), *weights, (2,), (num_tokens, KV_HEADS, HEAD_DIM)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def call(function, given: list[Tensor], mixes_in: bool = True, skips: bool = True) -> tuple[Tensor, ...]:
    x, x0, skip, stream_mix, q, k, v, value_mix, mixed_in = given
    angles = Rotary(HEAD_DIM, "half", 1024.0, len(x)).double().at(torch.arange(len(x)), torch.float64)
    rotation = Rotation(*(angle.to(x.dtype) for angle in angles))
    others = mixed_in if mixes_in else None
    streams, stream_mix = ((x, x0, skip), stream_mix) if skips else ((x, x0), stream_mix[:2])
    return function(streams, stream_mix, (q, k, v), rotation, value_mix, others)


def results_and_gradients(
    function, num_tokens: int, dtype: torch.dtype, mixes_in: bool = True, skips: bool = True
) -> list[Tensor]:
    """Gradients of zero for what is not used."""
    given = [operand.to(dtype).requires_grad_() for operand in operands(num_tokens)]
    results = call(function, given, mixes_in, skips)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(result.shape, generator=generator).to(dtype) for result in results]
    gradients = torch.autograd.grad(results, given, grads, allow_unused=True, materialize_grads=True)
    return [*(result.detach() for result in results), *gradients]


@pytest.fixture
def shared_however_few(monkeypatch) -> None:
    """Kernels also where a thread has few tokens, and several chunks of them."""
    monkeypatch.setattr(kernel, "pays_to_share", lambda *_: True)
    monkeypatch.setattr(kernel, "MOST_CHUNK_TOKENS", 32)


@needs_kernels
@pytest.mark.parametrize(("mixes_in", "skips"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_kernels_agree_with_plain(num_tokens, threads, mixes_in, skips, shared_however_few) -> None:
    torch.set_num_threads(threads)
    found = results_and_gradients(inputs, num_tokens, torch.float32, mixes_in, skips)
    expected = results_and_gradients(plain_inputs, num_tokens, torch.float64, mixes_in, skips)
    for name, ours, oracle in zip(NAMES, found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, oracle) < TOLERANCE, name


@needs_kernels
@pytest.mark.parametrize("used", range(5))
def test_a_result_that_nobody_uses_has_no_gradient(used, shared_however_few) -> None:
    gradients = []
    for function, dtype in ((inputs, torch.float32), (plain_inputs, torch.float64)):
        given = [operand.to(dtype).requires_grad_() for operand in operands(300)]
        result = call(function, given)[used]
        grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        gradients.append(torch.autograd.grad(result, given, grad, allow_unused=True, materialize_grads=True))
    for name, ours, oracle in zip(NAMES[5:], *gradients, strict=True):
        # Of the mixes, sums of thousands of terms that nearly cancel.
        assert (ours - oracle).abs().max() <= 1e-5 * max(1.0, oracle.abs().max().item()), name


@needs_kernels
def test_the_same_call_gives_the_same_bits(shared_however_few) -> None:
    torch.set_num_threads(3)
    once, twice = (results_and_gradients(inputs, 300, torch.float32) for _ in range(2))
    assert all(map(torch.equal, once, twice))


@pytest.mark.parametrize(("mixes_in", "skips"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_without_kernels_it_agrees_with_plain(dtype, tolerance, mixes_in, skips, monkeypatch) -> None:
    without_kernels(monkeypatch)
    torch.set_num_threads(2)
    found = results_and_gradients(inputs, 600, dtype, mixes_in, skips)
    expected = results_and_gradients(plain_inputs, 600, dtype, mixes_in, skips)
    for name, ours, plain in zip(NAMES, found, expected, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, plain) < tolerance, name


def test_a_compiler_sees_what_it_can_compile() -> None:
    def joined(*given: Tensor) -> Tensor:
        return torch.cat([result.flatten() for result in call(inputs, list(given))])

    given = [operand.requires_grad_() for operand in operands(600)]
    compiled = torch.compile(joined, backend="aot_eager", fullgraph=True)
    expected = torch.cat([result.flatten() for result in call(plain_inputs, given)])
    torch.testing.assert_close(compiled(*given), expected, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_a_head_lies_together_in_memory_where_kernels_made_it() -> None:
    _, *heads, _ = call(inputs, operands(600))
    assert all(x_THD.transpose(0, 1).is_contiguous() for x_THD in heads)


@needs_kernels
def test_a_second_derivative_is_refused() -> None:
    given = [operand.requires_grad_() for operand in operands(600)]
    total = sum(result.sum() for result in call(inputs, given))
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(total, given, create_graph=True)


@needs_kernels
def test_what_does_not_fit_is_left_to_pytorch() -> None:
    x, x0, skip, stream_mix, q, k, v, value_mix, mixed_in = operands(600)
    rotation = Rotary(HEAD_DIM, "half", 1024.0, 600)(600, torch.float32)
    fits = kernel.Given(x, x0, skip, stream_mix, q, k, v, *rotation, value_mix, mixed_in)
    assert kernel.suits(fits)
    for name, operand in fits._asdict().items():
        assert not kernel.suits(fits._replace(**{name: operand.double()}))
    assert not kernel.suits(fits._replace(cos=rotation.cos[:1], sin=rotation.sin[:1]))
    torch.set_num_threads(16)
    assert not kernel.suits(fits)


@needs_kernels
def test_one_token_that_is_not_a_number_spoils_no_other() -> None:
    given = operands(600)
    given[0][3, 0] = float("nan")
    others = [token for token in range(600) if token != 3]
    for result in call(inputs, given)[:4]:
        assert result[3].isnan().any()
        assert result[others].isfinite().all()
