"""Kernels with weights that the BLAS packs once for all chunks, and without, as with another BLAS."""

from collections.abc import Callable, Iterator

import pytest
import torch

from hotlap.kernels.cpu import attention, head, mlp, qkv
from hotlap.kernels.cpu import library as compiled
from tests.kernels_here import needs_kernels

NUM_TOKENS, WIDTH, HEAD_DIM = 700, 48, 16


@pytest.fixture
def blas() -> Iterator[list[object]]:
    """What is called of torch's BLAS; the kernels get it back after a test."""
    found = compiled._torch_blas()
    if not all(found):
        pytest.skip("torch's BLAS packs no weights")
    yield found
    compiled.needed_library().hotlap_set_blas(*found)


def without_packing(blas: list[object]) -> list[object]:
    return [blas[0], *[compiled.ffi.NULL] * 3]


def of_mlp() -> list[torch.Tensor]:
    x, attended = torch.randn(NUM_TOKENS, WIDTH), torch.randn(NUM_TOKENS, WIDTH)
    weights = (torch.randn(shape) / 7 for shape in ((WIDTH, WIDTH), (192, WIDTH), (WIDTH, 192)))
    return [*mlp.forward(mlp.Given(x, attended, *weights))]


def of_qkv() -> list[torch.Tensor]:
    streams = torch.randn(3, NUM_TOKENS, WIDTH)
    cos, sin = torch.randn(2, NUM_TOKENS, 1, HEAD_DIM // 2)
    value_embedding = torch.randn(NUM_TOKENS, WIDTH // HEAD_DIM, HEAD_DIM)
    weights = torch.randn(3, WIDTH, WIDTH) / 7
    mixes = torch.randn(3), torch.randn(2)
    return [*qkv.forward(qkv.Given(*streams, mixes[0], *weights, cos, sin, mixes[1], value_embedding))]


def of_attention() -> list[torch.Tensor]:
    q, k, v = torch.randn(3, NUM_TOKENS, WIDTH // HEAD_DIM, HEAD_DIM)
    first_key = (torch.arange(NUM_TOKENS) - 200).clamp(min=0).int()
    return [*attention.forward(q, k, v, first_key, HEAD_DIM**-0.5)]


def of_head() -> list[torch.Tensor]:
    x, weight = torch.randn(NUM_TOKENS, WIDTH), torch.randn(512, WIDTH) / 7
    targets = torch.randint(512, (NUM_TOKENS,))
    return [*head.loss_and_gradients(x, weight, targets, 15.0, 1 / NUM_TOKENS, needs_grad=True)]


def seeded(kernel: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return kernel()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kernel", [of_mlp, of_qkv, of_head])
def test_packed_weights_change_nothing_but_the_last_digits(kernel, threads, blas, monkeypatch) -> None:
    # Chunks of 256: the last one is shorter, and is not for packed weights.
    for module in (mlp, qkv):
        monkeypatch.setattr(module, "chunk_tokens", lambda *_: 256)
    monkeypatch.setattr(head, "CHUNK_LOGITS", 256 * 512)
    torch.set_num_threads(threads)
    results = []
    for functions in (blas, without_packing(blas)):
        compiled.needed_library().hotlap_set_blas(*functions)
        results.append(seeded(kernel))
    for packed, plain in zip(*results, strict=True):
        torch.testing.assert_close(packed, plain, atol=2e-6, rtol=2e-6)


@needs_kernels
@pytest.mark.parametrize("kernel", [of_mlp, of_qkv, of_attention])
def test_whichever_thread_is_free_computes_the_same(kernel) -> None:
    """Three threads, where this machine may have fewer cores: who takes which tokens changes."""
    torch.set_num_threads(3)
    first, *others = [seeded(kernel) for _ in range(40)]
    assert all(torch.equal(ours, again) for other in others for ours, again in zip(first, other, strict=True))


@needs_kernels
def test_packed_weights_have_room_of_their_own(blas) -> None:
    library = compiled.needed_library()
    given = compiled.ffi.new("hotlap_head_t *", {"T": 512, "C": WIDTH, "V": 512, "chunk_tokens": 256})
    with_room = library.hotlap_head_floats(given, 2)
    library.hotlap_set_blas(*without_packing(blas))
    assert with_room - library.hotlap_head_floats(given, 2) >= WIDTH * 512
