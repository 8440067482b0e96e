"""The hand-written gradients of norm, rotation, linear map and MLP against plain versions under autograd."""

import pytest
import torch
from hotlap.model.products import linear, linears, plain_linear
from torch import Tensor

from hotlap.model import products
from hotlap.model.head import softcapped_cross_entropy
from hotlap.model.layers import mix, plain_rms_norm, rms_norm
from hotlap.model.mlp import add_mlp, plain_add_mlp
from hotlap.model.rotary import Rotary, Rotation, norm_and_rotate, plain_norm_and_rotate
from tests.kernels_here import needs_kernels


def rotation(num_tokens: int, head_dim: int, dtype: torch.dtype) -> Rotation:
    # Angles in the working precision: cos² + sin² = 1 to 1e-16, which a float32 table would spoil.
    return Rotary(head_dim, "half", 1024.0, num_tokens).double().at(torch.arange(num_tokens), dtype)


def value_and_gradients(function, *operands: Tensor) -> list[Tensor]:
    leaves = [operand.clone().requires_grad_() for operand in operands]
    out = function(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# name: (fast, plain, operands). Heads of a joined product are a view with gaps; a row of zeros has no norm.
CASES = {
    "norm": (rms_norm, plain_rms_norm, [random(5, 64)]),
    "norm of heads": (rms_norm, plain_rms_norm, [random(5, 6, 16)[:, :4]]),
    "norm of zeros and tiny rows": (
        rms_norm,
        plain_rms_norm,
        [random(3, 8) * torch.tensor([[0], [1e-8], [1]])],
    ),
    "norm and rotation": (
        lambda x: norm_and_rotate(x, rotation(5, 16, x.dtype)),
        lambda x: plain_norm_and_rotate(x, rotation(5, 16, x.dtype)),
        [random(5, 3, 16)],
    ),
    "mlp": (
        add_mlp,
        plain_add_mlp,
        [random(9, 16), random(64, 16, seed=1), random(16, 64, seed=2)],
    ),
    "mlp in parts": (
        add_mlp,
        plain_add_mlp,
        [random(768, 16), random(64, 16, seed=1), random(16, 64, seed=2)],
    ),
    "mlp after attention": (
        add_mlp,
        plain_add_mlp,
        [random(9, 16), random(64, 16, seed=1), random(16, 64, seed=2), random(9, 8), random(16, 8, seed=3)],
    ),
    "linear in parts": (linear, plain_linear, [random(768, 16), random(24, 16, seed=1)]),
    "three linears in parts": (
        lambda x, *weights: torch.cat(linears(x, *weights), dim=1),
        lambda x, *weights: torch.cat([plain_linear(x, weight) for weight in weights], dim=1),
        [random(768, 16), *(random(size, 16, seed=size) for size in (24, 16, 8))],
    ),
}


@pytest.fixture(autouse=True)
def three_threads(monkeypatch) -> None:
    """Products are cut for them; one thread, as the tests have, would cut nothing."""
    monkeypatch.setattr(products, "num_threads", lambda: 3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES)
def test_fast_agrees_with_plain(case, dtype, tolerance) -> None:
    fast, plain, operands = CASES[case]
    operands = [operand.to(dtype) for operand in operands]
    found, expected = value_and_gradients(fast, *operands), value_and_gradients(plain, *operands)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_compiled_agrees_with_plain(case) -> None:
    fast, plain, operands = CASES[case]
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    found, expected = value_and_gradients(compiled, *operands), value_and_gradients(plain, *operands)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def squares_of_gradients(function, *operands: Tensor) -> Tensor:
    """Of a sum, whose gradient is a constant: what lets through unnoticed what cannot be differentiated."""
    return sum(
        gradient.square().sum()
        for gradient in torch.autograd.grad(function(*operands).sum(), operands, create_graph=True)
    )


def head(x: Tensor, weight: Tensor) -> Tensor:
    return softcapped_cross_entropy(x, weight, torch.arange(len(x)), 15.0)


BY_HAND = {
    **{name: CASES[name][::2] for name in ("norm", "norm and rotation", "mlp")},
    "mix": (mix, [random(2), random(5, 16), random(5, 16)]),
    "head": (head, [random(9, 16), random(64, 16)]),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float64) for case in BY_HAND if case != "mix"),
        *(pytest.param(case, torch.float32, marks=needs_kernels) for case in BY_HAND),
    ],
)
def test_second_derivatives_are_refused(case, dtype) -> None:
    function, operands = BY_HAND[case]
    leaves = [operand.to(dtype).requires_grad_() for operand in operands]
    with pytest.raises(RuntimeError, match=r"create_graph|no autograd formula"):
        squares_of_gradients(function, *leaves).backward()


@pytest.mark.parametrize("weight_dtype", [torch.float64, torch.float32])
def test_second_derivatives_of_a_cut_product_are_those_of_the_whole(weight_dtype) -> None:
    found, expected = [], []
    for function, gradients in ((linear, found), (plain_linear, expected)):
        x, weight = random(768, 16), random(24, 16, seed=1, dtype=weight_dtype)
        leaves = [x.requires_grad_(), weight.requires_grad_()]
        gradients += torch.autograd.grad(squares_of_gradients(function, *leaves), leaves)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_mlp_keeps_one_hidden_tensor_for_its_backward() -> None:
    x, expand, out = random(9, 16), random(64, 16, seed=1), random(16, 64, seed=2)
    kept = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape == (9, 64):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        add_mlp(*(operand.requires_grad_() for operand in (x, expand, out)))
    assert len(kept) == 1


@pytest.mark.parametrize(("tokens", "parts"), [(768, 3), (767, 1), (765, 1), (1536, 3), (1, 1)])
def test_products_are_cut_into_even_parts_that_are_not_too_short(tokens, parts) -> None:
    assert products.token_parts(torch.empty(tokens, 4)) == parts
    assert products.token_parts(torch.empty(tokens, 4, device="meta")) == 1


def test_gradients_of_a_cut_product_are_added_up_in_the_precision_of_the_weight() -> None:
    x, weight = random(768, 64, dtype=torch.bfloat16), random(32, 64, seed=1, dtype=torch.float32)
    _, *cut = value_and_gradients(linear, x, weight)
    _, *whole = value_and_gradients(plain_linear, x.double(), weight.to(torch.bfloat16).double())
    assert [gradient.dtype for gradient in cut] == [torch.bfloat16, torch.float32]
    assert not torch.equal(cut[1], cut[1].bfloat16().float())
    for ours, exact in zip(cut, whole, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=2**-7 * float(exact.abs().max()))
