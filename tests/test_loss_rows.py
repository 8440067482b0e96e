"""The Triton kernel of the loss: interpreted against the plain loss, and compiled for every GPU we know."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hotlap.kernels.chunked_loss import chunked_cross_entropy
from hotlap.kernels.cuda.loss_rows import loss_rows
from hotlap.kernels.install import _install_loss
from hotlap.model.head import cross_entropy
from hotlap.recipes import resolve
from tests.tiny import made_up_tokens, make_masking, make_model
from tests.triton_here import needs_triton, triton_process

SOFTCAPS = [15.0, 40.0, 100.0, None]
# Of float32: exponents of a softcap of 100 reach 2 · 100 · log2(e), of which the last bit is 3e-5.
FLOAT32_TOLERANCE = 3e-6
BLOCK = 4096  # columns per pass of the kernel's loop


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    with triton_process(interpreted=True, cache=str(tmp_path_factory.mktemp("triton"))) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    with triton_process(interpreted=False, cache=str(tmp_path_factory.mktemp("triton"))) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


def in_triton(*operands, chunk_tokens: int = 16, **settings) -> Tensor:
    return chunked_cross_entropy(*operands, chunk_tokens=chunk_tokens, passes="triton", **settings)


def operands(num_tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and targets, with logits of standard deviation 4 and targets at both ends."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 32, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, 32, generator=generator) * 4 / 32**0.5
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    return x, weight, targets


def run(loss, x: Tensor, weight: Tensor, *args, **settings) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(x, weight, *args, **settings)
    value.backward()
    return [value.detach(), x.grad, weight.grad]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Of loss, gradient with respect to x and with respect to the weight, in the norm of the whole tensor."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs]


def errors_against_plain(num_tokens, vocabulary, softcap, reduction, dtype) -> list[float]:
    """Against the plain loss in float64, of operands rounded to `dtype`."""
    x, weight, targets = operands(num_tokens, vocabulary, dtype)
    exact = (x.double(), weight.to(dtype).double(), targets, softcap)
    found = run(in_triton, x, weight, targets, softcap, reduction=reduction)
    assert [t.dtype for t in found] == [torch.float32, dtype, torch.float32]
    return errors(found, run(cross_entropy, *exact, reduction=reduction))


@needs_triton
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize(
    ("num_tokens", "vocabulary"),
    [(1, 64), (33, 515), (5, BLOCK + 1), (5, 2 * BLOCK)],
    ids=["one token", "a remainder of a chunk and of a block", "one column in the last block", "full blocks"],
)
def test_loss_and_gradients_agree_with_plain(interpreter, num_tokens, vocabulary, softcap, reduction):
    found = interpreter(errors_against_plain, num_tokens, vocabulary, softcap, reduction, torch.float32)
    assert max(found) < FLOAT32_TOLERANCE


@needs_triton
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_in_bfloat16_only_rounding_differs(interpreter, softcap):
    """The last bit of bfloat16 is 2⁻⁸ ≈ 4e-3: logits and gradients are each rounded to it once."""
    found = interpreter(errors_against_plain, 33, 515, softcap, "mean", torch.bfloat16)
    assert found[0] < 1e-3
    assert max(found) < 1e-2


def loss_error_in_bfloat16(softcap) -> float:
    x, weight, targets = operands(33, 515, torch.bfloat16)
    return errors([in_triton(x, weight, targets, softcap)], [cross_entropy(x, weight, targets, softcap)])[0]


@needs_triton
@pytest.mark.parametrize("softcap", [15.0, None])
def test_bfloat16_logits_are_rounded_as_in_the_plain_loss(interpreter, softcap):
    assert interpreter(loss_error_in_bfloat16, softcap) < 1e-6


def losses_with_and_without_gradients() -> tuple[float, float, bool]:
    """Also whether the pass without gradients left the logits as they were."""
    x, weight, targets = operands(33, 515, torch.float32)
    loss = run(in_triton, x, weight, targets, 15.0)[0].item()
    with torch.no_grad():
        alone = in_triton(x, weight.requires_grad_(), targets, 15.0).item()
    logits = x @ weight.detach().T
    kept = logits.clone()
    loss_rows(logits, targets, torch.empty(33), 15.0, 1.0, needs_maximum=False, needs_grad=False)
    return loss, alone, torch.equal(logits, kept)


@needs_triton
def test_without_gradients_the_loss_is_the_same_and_none_are_written(interpreter):
    loss, alone, unchanged = interpreter(losses_with_and_without_gradients)
    assert loss == alone
    assert unchanged


def extreme_errors(softcap) -> list[float]:
    """With logits of ±1e4, the largest of which without a softcap decides alone."""
    x, weight = torch.tensor([[1.0], [-1.0]]) * 1e4, torch.tensor([[1.0], [1.0], [-1.0]])
    targets = torch.tensor([0, 0])
    found = run(in_triton, x, weight, targets, softcap)
    expected = run(cross_entropy, x.double(), weight.double(), targets, softcap)
    return [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]


@needs_triton
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_extreme_logits_stay_finite(interpreter, softcap):
    loss, *gradients = interpreter(extreme_errors, softcap)
    assert loss < 1e-3  # of 1e4
    assert max(gradients) < 1e-3  # of 5e3


def losses_by_row(targets: list[int]) -> list[float]:
    logits, losses = torch.zeros(len(targets), 5), torch.empty(len(targets))
    loss_rows(logits, torch.tensor(targets), losses, 15.0, 1.0, needs_maximum=False, needs_grad=True)
    return losses.tolist()


@needs_triton
def test_a_target_outside_the_vocabulary_makes_its_loss_nan(interpreter):
    inside, *outside = interpreter(losses_by_row, [4, 5, 7, 8, -1, -100, 2**40])
    assert inside == pytest.approx(torch.tensor(5.0).log().item())
    assert all(loss != loss for loss in outside)


def compiled_differences() -> list[float]:
    x, weight, targets = operands(33, 515, torch.float32)
    compiled = torch.compile(in_triton, backend="aot_eager", fullgraph=True, dynamic=False)
    return errors(run(compiled, x, weight, targets, 15.0), run(in_triton, x, weight, targets, 15.0))


@needs_triton
def test_inside_compile_it_is_one_opaque_operator(interpreter):
    assert interpreter(compiled_differences) == [0.0, 0.0, 0.0]


def model_losses(recipe: str) -> tuple[str, float, float]:
    """What runs the loss of a model on an uncompiled CUDA device of 8 GiB; its loss, and the plain one."""
    config = resolve(recipe, "pico")
    tokens, targets = made_up_tokens(128, config.model.vocab_size)
    plans = make_masking(config).plans(tokens, None)
    model = make_model(config)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)  # with a head of zeros, every loss is log(vocabulary)
    plain = model(tokens, targets, plans).item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8 * 2**30))
        part = _install_loss(model, torch.device("cuda"), "no kernels on cuda", 128, compiles_loss=False)
    return part.kernel, model(tokens, targets, plans).item(), plain


@needs_triton
@pytest.mark.parametrize("recipe", ["softcap", "adamw"])
def test_a_model_takes_it_as_its_loss(interpreter, recipe):
    kernel, loss, plain = interpreter(model_losses, recipe)
    assert kernel == "Triton, chunks of 128 tokens (not compiled)"
    assert loss == pytest.approx(plain, rel=1e-6)


# (has_softcap, needs_maximum, needs_grad): softcap's training and validation, GPT-2's training.
VARIANTS = [(True, False, True), (True, False, False), (False, True, True)]


def compiled_for(capability: int) -> list[tuple[int, bool]]:
    """Of each variant: bytes of shared memory, and whether logits are loaded by 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hotlap.kernels.cuda.loss_rows_kernel import LARGEST_BLOCK, NUM_WARPS, loss_rows_kernel

    found = []
    tensors = {"logits": "*bf16", "targets": "*i64", "losses": "*fp32"}
    numbers = {"vocabulary": "i32", "softcap": "fp32", "factor": "fp32"}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(4)}  # pointers and vocabulary
    for variant in VARIANTS:
        constants = dict(zip(("has_softcap", "needs_maximum", "needs_grad"), variant, strict=True))
        constants["block"] = LARGEST_BLOCK
        signature = tensors | numbers | dict.fromkeys(constants, "constexpr")
        source = ASTSource(loss_rows_kernel, signature, constants, aligned)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={"num_warps": NUM_WARPS})
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
        found.append((compiled.metadata.shared, "ld.global.v4" in compiled.asm["ptx"]))
    return found


@needs_triton
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_it_compiles_for_every_gpu(compiler, capability):
    for shared_bytes, loads_are_wide in compiler(compiled_for, capability):
        assert shared_bytes <= 48 * 1024  # what every GPU grants without asking
        assert loads_are_wide


@pytest.mark.parametrize(
    ("logits", "targets", "losses", "match"),
    [
        (torch.zeros(8, 4).T, torch.zeros(4).long(), torch.zeros(4), "contiguous rows"),
        (torch.zeros(4, 8).double(), torch.zeros(4).long(), torch.zeros(4), "logits: expected bfloat16"),
        (torch.zeros(4, 8), torch.zeros(4).int(), torch.zeros(4), "targets: expected torch.int64"),
        (torch.zeros(4, 8), torch.zeros(3).long(), torch.zeros(4), "targets: expected"),
        (torch.zeros(4, 8), torch.zeros(8).long()[::2], torch.zeros(4), "targets: expected"),
        (torch.zeros(4, 8), torch.zeros(4).long(), torch.zeros(5), "losses: expected"),
    ],
    ids=["transposed", "float64", "int32 targets", "too few targets", "strided targets", "too many losses"],
)
def test_operands_that_the_kernel_would_misread_are_refused(logits, targets, losses, match):
    with pytest.raises((TypeError, ValueError), match=match):
        loss_rows(logits, targets, losses, 15.0, 1.0, False, True)
