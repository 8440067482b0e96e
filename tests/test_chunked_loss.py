"""The chunked loss against the plain one: loss, gradients, precision and what it does not compute."""

import pytest
import torch
from torch import Tensor

from hotlap.kernels.chunked_loss import chunked_cross_entropy, is_unshifted, loss_and_gradients
from hotlap.kernels.cpu import shares
from hotlap.model.head import cross_entropy
from tests.kernels_here import needs_kernels

TOLERANCE = 1e-6
chosen = "torch"  # the `passes` that a test asks for


@pytest.fixture(
    autouse=True, params=["torch", *(pytest.param(way, marks=needs_kernels) for way in ("rows", "all"))]
)
def passes(request, monkeypatch) -> str:
    """Every test with the passes in PyTorch, with those over the logits in C, and with all of it in C."""
    monkeypatch.setitem(globals(), "chosen", request.param)
    return request.param


def chunked(x: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, **settings) -> Tensor:
    """The loss by the passes under test, or by the nearest ones that take such operands."""
    passes = chosen
    if not is_unshifted(softcap) or x.dtype == torch.float64:
        passes = "torch"
    elif passes == "all" and (x.dtype != torch.float32 or not len(x)):
        passes = "rows"
    if not len(x):
        passes = "torch"
    return chunked_cross_entropy(x, weight, targets, softcap, passes=passes, **settings)


SOFTCAPS = [15.0, 30.0, 100.0, None, 0.0]


def operands(num_tokens: int = 300, width: int = 48, vocabulary: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) / width**0.5
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    targets[0], targets[-1] = vocabulary - 1, 0
    return x, weight, targets


def relative_error(found: Tensor, expected: Tensor) -> float:
    """In the norm of the whole tensor: single entries of a float32 gradient are off by 1e-6 in any order."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def run(head, x: Tensor, weight: Tensor, *args, **settings) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = head(x, weight, *args, **settings)
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_tokens", [7, 64, 299, 300, 1000])
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_chunked_agrees_with_plain(softcap, chunk_tokens, reduction) -> None:
    x, weight, targets = operands()
    expected = run(cross_entropy, x.double(), weight.double(), targets, softcap, reduction=reduction)
    found = run(chunked, x, weight, targets, softcap, chunk_tokens=chunk_tokens, reduction=reduction)
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, plain) < TOLERANCE


@pytest.mark.parametrize("softcap", [15.0, None])
def test_a_product_that_is_cut_for_two_threads_changes_nothing(softcap, monkeypatch) -> None:
    monkeypatch.setattr(shares, "num_threads", lambda: 2)
    x, weight, targets = operands(num_tokens=1100)
    found = run(chunked, x, weight, targets, softcap, chunk_tokens=512)
    expected = run(cross_entropy, x.double(), weight.double(), targets, softcap)
    for ours, plain in zip(found, expected, strict=True):
        assert relative_error(ours, plain) < TOLERANCE


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_in_float64_it_is_the_same_function(softcap) -> None:
    x, weight, targets = operands()
    x, weight = x.double(), weight.double()
    found = run(chunked, x, weight, targets, softcap, chunk_tokens=64)
    expected = run(cross_entropy, x, weight, targets, softcap)
    for ours, plain in zip(found, expected, strict=True):
        assert relative_error(ours, plain) < 1e-12


@pytest.mark.parametrize("target", [-100, -1, 512])
def test_targets_outside_the_vocabulary_are_refused(target) -> None:
    x, weight, targets = operands(7)
    targets[3] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked(x, weight, targets, 15.0)


def test_no_tokens_have_no_loss_and_no_gradient() -> None:
    x, weight, targets = operands(7)
    loss, grad_x, grad_weight = run(chunked, x[:0], weight, targets[:0], 15.0, reduction="sum")
    assert loss == 0
    assert grad_x.shape == (0, 48)
    assert grad_weight.eq(0).all()


@pytest.mark.parametrize("target", [0, 511])
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_targets_at_the_edges_of_the_vocabulary(softcap, target) -> None:
    x, weight, _ = operands(7)
    targets = torch.full((7,), target)
    expected = run(cross_entropy, x.double(), weight.double(), targets, softcap)
    for ours, plain in zip(run(chunked, x, weight, targets, softcap), expected, strict=True):
        assert relative_error(ours, plain) < TOLERANCE


@pytest.mark.parametrize("softcap", [15.0, 30.0, 40.0, 100.0, None])
def test_extreme_logits_stay_finite(softcap) -> None:
    x = torch.tensor([[1.0], [-1.0]]) * 1e4
    weight = torch.tensor([[1.0], [1.0], [1.0]])
    weight[2] = -1.0
    targets = torch.tensor([0, 0])
    expected = run(cross_entropy, x.double(), weight.double(), targets, softcap)
    found = run(chunked, x, weight, targets, softcap)
    for ours, plain in zip(found, expected, strict=True):
        assert torch.allclose(ours.double(), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [7, 100, 300])
def test_without_gradients_the_loss_is_the_same(chunk_tokens, dtype) -> None:
    x, weight, targets = operands()
    x = x.to(dtype)
    expected = run(cross_entropy, x, weight.to(dtype), targets, 15.0)
    found = run(chunked, x, weight, targets, 15.0, chunk_tokens=chunk_tokens)
    with torch.no_grad():
        assert chunked(x, weight, targets, 15.0, chunk_tokens=chunk_tokens) == found[0]
    for ours, plain in zip(found, expected, strict=True):
        assert relative_error(ours, plain.double()) < (TOLERANCE if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("softcap", [15.0, 100.0])
def test_all_logits_at_the_lower_cap(softcap) -> None:
    x, weight = torch.full((3, 1), -1e4), torch.ones(5, 1)
    loss = chunked(x, weight, torch.tensor([0, 2, 4]), softcap)
    assert loss.item() == pytest.approx(torch.tensor(5.0).log().item())


@pytest.mark.parametrize("softcap", [5.0, None])
def test_gradcheck(softcap) -> None:
    x, weight, targets = operands(9, 4, 11)
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: chunked(x, w, targets, softcap, chunk_tokens=4), (x, weight))


def test_the_gradient_of_the_loss_scales_both_gradients() -> None:
    x, weight, targets = operands()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    chunked(x, weight, targets, 15.0).backward()
    once = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    (chunked(x, weight, targets, 15.0) * 0.25).backward()
    assert torch.allclose(x.grad, once[0] * 0.25)
    assert torch.allclose(weight.grad, once[1] * 0.25)


def test_bfloat16_activations_with_a_float32_weight() -> None:
    x, weight, targets = operands()
    found = run(chunked, x.bfloat16(), weight, targets, 15.0)
    expected = run(cross_entropy, x, weight, targets, 15.0)
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.float32]
    for ours, plain in zip(found, expected, strict=True):
        assert relative_error(ours, plain) < 0.02


def test_bfloat16_logits_are_rounded_as_in_the_plain_head() -> None:
    x, weight, targets = operands()
    x, weight = x.bfloat16(), 3 * weight
    plain = cross_entropy(x, weight, targets, 15.0)
    assert relative_error(chunked(x, weight, targets, 15.0), plain) < 1e-6


def test_without_gradients_none_are_computed(monkeypatch) -> None:
    monkeypatch.setitem(globals(), "chosen", "torch")
    x, weight, targets = operands()
    weight.requires_grad_()
    expected = chunked(x, weight, targets, 15.0).item()

    def refuse(*_: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr("hotlap.kernels.chunked_loss._grad_logits", refuse)
    with torch.no_grad():
        assert chunked(x, weight, targets, 15.0).item() == expected
    with pytest.raises(AssertionError, match="a gradient was computed"):
        chunked(x, weight, targets, 15.0)


@pytest.mark.parametrize("by", ["torch", pytest.param("rows", marks=needs_kernels)])
def test_no_tensor_as_large_as_the_logits(by) -> None:
    x, weight, targets = operands(num_tokens=512, width=8, vocabulary=256)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor))
            return result

    with Watch():
        loss_and_gradients(x, weight, targets, 15.0, 1.0, 64, needs_grad=True, passes=by)
    # Two buffers of a chunk or, where the passes are in C, one of twice its tokens.
    assert max(sizes) == 64 * 256 * (2 if by == "rows" else 1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inside_compile() -> None:
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True, dynamic=False)
    x, weight, targets = operands()
    found = run(compiled, x, weight, targets, 15.0)
    for ours, eager in zip(found, run(chunked, x, weight, targets, 15.0), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("passes", ["rows", "all"])
@pytest.mark.parametrize("softcap", [0.0, None, 50.0])
def test_a_softcap_that_the_kernels_do_not_know_is_refused(passes, softcap) -> None:
    with pytest.raises(ValueError, match="softcap"):
        chunked_cross_entropy(*operands(), softcap, passes=passes)


def test_a_second_derivative_is_refused() -> None:
    x, weight, targets = operands()
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"create_graph|no autograd formula"):
        torch.autograd.grad(chunked(x, weight, targets, 15.0), x, create_graph=True)[0].sum().backward()
