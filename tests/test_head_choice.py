"""How the loss is computed on CUDA: the rule, what `install` makes of it, and what the header says."""

from types import SimpleNamespace

import pytest
import torch

from hotlap.kernels.chunked_loss import DEFAULT_CHUNK_TOKENS
from hotlap.kernels.cuda import head_choice
from hotlap.kernels.cuda.head_choice import HeadChoice, choose_head, full_logits_bytes, triton_chunk_tokens
from hotlap.kernels.install import Installed, _install_loss
from hotlap.model.head import cross_entropy
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.compile import choose_mode, compiles_loss
from tests.tiny import make_model

GIB = 2**30
H100_BYTES = 85_017_755_648
TOKENS, VOCABULARY = 65_536, 50_304  # of `small`
CUDA = torch.device("cuda")


def choice(memory_bytes: int = H100_BYTES, **changes) -> HeadChoice:
    given = {"tokens": TOKENS, "vocabulary": VOCABULARY, "element_bytes": 2, "compiled": True}
    return choose_head(**{"memory_bytes": memory_bytes, "no_triton": None, **given, **changes})


def test_an_h100_takes_full_logits_if_the_loss_is_compiled():
    assert choice() == HeadChoice(
        "full", TOKENS, 2 * TOKENS * VOCABULARY * 2, "full logits, fused by the compiler (12.3 of 79.2 GiB)"
    )


def test_a_quarter_of_the_memory_is_the_most_that_full_logits_take():
    exactly = 4 * full_logits_bytes(TOKENS, VOCABULARY, 2)
    assert choice(exactly).how == "full"
    assert choice(exactly - 1).how == "triton"


@pytest.mark.parametrize(
    ("memory_gib", "changes", "chunk_tokens", "reason"),
    [
        (24, {}, 8192, "full logits would take 12.3 of 24.0 GiB"),
        (8, {}, 4096, "full logits would take 12.3 of 8.0 GiB"),
        (80, {"compiled": False}, 8192, "not compiled"),
        (24, {"element_bytes": 4}, 4096, "full logits would take 24.6 of 24.0 GiB"),
        (24, {"tokens": 300, "compiled": False}, 300, "not compiled"),
        (1, {}, 512, "full logits would take 12.3 of 1.0 GiB"),
    ],
)
def test_elsewhere_chunks_of_tokens_in_triton(memory_gib, changes, chunk_tokens, reason):
    found = choice(memory_gib * GIB, **changes)
    assert (found.how, found.chunk_tokens) == ("triton", chunk_tokens)
    assert found.logits_bytes == chunk_tokens * VOCABULARY * changes.get("element_bytes", 2)
    assert found.description == f"Triton, chunks of {chunk_tokens:,} tokens ({reason})"


@pytest.mark.parametrize("vocabulary", [512, 50_304, 262_144])
@pytest.mark.parametrize("memory_gib", [1, 8, 24, 80])
def test_a_chunk_is_a_power_of_two_that_stays_within_its_bounds(memory_gib, vocabulary):
    tokens = triton_chunk_tokens(memory_gib * GIB, vocabulary, element_bytes=2)
    most_bytes = min(GIB, memory_gib * GIB // 16)
    assert tokens.bit_count() == 1
    assert tokens * vocabulary * 2 <= most_bytes < 2 * tokens * vocabulary * 2


def test_a_chunk_is_never_shorter_than_a_tile():
    assert triton_chunk_tokens(GIB, 2**30, element_bytes=2) == 128


def test_without_triton_chunks_in_pytorch_and_the_reason():
    found = choice(24 * GIB, no_triton="Triton is not installed")
    assert (found.how, found.chunk_tokens) == ("torch", DEFAULT_CHUNK_TOKENS)
    assert found.logits_bytes == 2 * DEFAULT_CHUNK_TOKENS * VOCABULARY * 4
    assert found.description == "chunked PyTorch (Triton is not installed)"


def installed_on_cuda(monkeypatch, *, memory_bytes, triton, dtype=torch.bfloat16, compiles_loss=True):
    """The line of the header, and the loss of a model at pico."""
    properties = SimpleNamespace(total_memory=memory_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(head_choice, "no_triton", lambda: None if triton else "no Triton")
    model = make_model(resolve("softcap", "pico"), dtype=dtype)
    part = _install_loss(model, CUDA, "no kernels on cuda", 1024, compiles_loss)
    return str(Installed((part,))), model.loss


def test_full_logits_are_the_plain_loss(monkeypatch):
    line, loss = installed_on_cuda(monkeypatch, memory_bytes=GIB, triton=True)
    assert line == "loss in full logits, fused by the compiler (0.0 of 1.0 GiB)"
    assert loss is cross_entropy


@pytest.mark.parametrize("softcap", [15.0, None])
def test_of_full_logits_the_compiler_keeps_bfloat16_only(softcap):
    """With the compiler's own decompositions and choice of what the forward pass saves."""
    saved = []
    compiled = torch.compile(
        cross_entropy, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False
    )
    x = torch.randn(256, 64, dtype=torch.bfloat16, requires_grad=True)
    weight, targets = torch.randn(1024, 64, requires_grad=True), torch.randint(1024, (256,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compiled(x, weight, targets, softcap)
    assert [t.dtype for t in saved if t.shape == (256, 1024)] == [torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "passes", "line"),
    [
        ({"compiles_loss": False}, "triton", "loss in Triton, chunks of 1,024 tokens (not compiled)"),
        (
            {"memory_bytes": 2**22},
            "triton",
            "loss in Triton, chunks of 256 tokens (full logits would take 0.0 of 0.0 GiB)",
        ),
        ({"compiles_loss": False, "triton": False}, "torch", "loss in chunked PyTorch (no Triton)"),
        ({"compiles_loss": False, "dtype": torch.float64}, "torch", "loss in chunked PyTorch (float64)"),
    ],
    ids=str,
)
def test_other_choices_are_chunks_of_the_size_that_the_header_states(monkeypatch, changes, passes, line):
    found, loss = installed_on_cuda(monkeypatch, **{"memory_bytes": GIB, "triton": True, **changes})
    assert found == line
    assert loss.keywords["passes"] == passes
    assert passes == "torch" or f"chunks of {loss.keywords['chunk_tokens']:,} tokens" in line


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize(
    ("asked", "on_cuda"),
    [("auto", True), ("model", True), ("parts", True), ("block", False), ("off", False)],
)
def test_whether_the_loss_is_compiled_is_known_before_the_mode(asked, on_cuda, world_size, device):
    config = updated(resolve("softcap", "pico"), {"runtime.compile": asked})
    expected = compiles_loss(config, torch.device(device))
    mode = choose_mode(config, torch.device(device), torch.bfloat16, 2, Installed(()), world_size).mode
    assert expected == (mode in ("parts", "model"))
    assert device == "cpu" or expected == on_cuda
