"""What the head moves per step on CUDA: bounds at the records' size, and the count itself."""

import pytest
import torch

from hotlap.kernels.cuda.head_choice import triton_chunk_tokens
from hotlap.kernels.cuda.head_traffic import head_traffic
from hotlap.kernels.cuda.launches import Launches

TOKENS, WIDTH, VOCABULARY = 65_536, 768, 50_304
LOGITS_BYTES = TOKENS * VOCABULARY * 2  # in bfloat16


def traffic(passes, chunk_tokens):
    return head_traffic(TOKENS, WIDTH, VOCABULARY, softcap=15.0, chunk_tokens=chunk_tokens, passes=passes)


def test_in_triton_a_step_stays_below_60_launches_and_45_gb_outside_matmuls():
    found = traffic("triton", triton_chunk_tokens(24 * 2**30, VOCABULARY, element_bytes=2))
    chunks = TOKENS // 8192
    assert found.matmuls == 3 * chunks
    # Per chunk the kernel and the sum of the weight's gradient; once the weight's cast, a zero, the sum of
    # the losses, and the two gradients that the backward pass scales.
    assert found.launches - found.matmuls == 2 * chunks + 5
    assert found.launches <= 60
    # Logits are read twice and overwritten once; everything else is small beside them.
    assert 3 * LOGITS_BYTES < found.bytes_outside_matmuls < 3.7 * LOGITS_BYTES < 45e9


def test_in_pytorch_it_would_be_many_times_as_much():
    ours, theirs = traffic("triton", 8192), traffic("torch", 512)
    assert theirs.launches > 3500
    assert theirs.bytes_outside_matmuls > 10 * ours.bytes_outside_matmuls


def test_nothing_in_float32_is_as_large_as_a_chunk_of_logits():
    class Largest(Launches):
        float32_elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = super().__torch_dispatch__(func, types, args, kwargs)
            tensors = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            sizes = [x.numel() for x in tensors if x.dtype == torch.float32]
            self.float32_elements = max(self.float32_elements, *sizes, 0)
            return result

    with Largest() as seen:
        traffic("triton", 8192)
    assert seen.float32_elements == VOCABULARY * WIDTH  # the weight's gradient


MIB = 2**20


@pytest.mark.parametrize(
    ("call", "launches", "moved_mib"),
    [
        (lambda x: x * 2, 1, 8),
        (lambda x: x.mul_(2), 1, 8),
        (lambda x: x.addcmul_(x, x, value=-1), 1, 8),  # given three times, read once
        (lambda x: x.copy_(x.to(torch.bfloat16)), 2, 6 + 6),
        (lambda x: torch.mul(x, 2, out=torch.empty_like(x)), 1, 8),
        (lambda x: x.sum(), 1, 4),
        (lambda x: x.T[3:].unsqueeze(0), 0, 0),
        (lambda x: x.new_zeros(MIB), 1, 4),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: x.T @ x, 1, 12),
        (lambda x: x.addmm_(x.clone(), x.clone(), beta=0), 3, 8 + 8 + 12),
        (lambda x: x.addmm_(x.clone(), x.clone()), 3, 8 + 8 + 16),
    ],
)
def test_an_operator_reads_its_inputs_and_writes_its_outputs(call, launches, moved_mib):
    x = torch.empty(1024, 1024, device="meta")  # 4 MiB
    with Launches() as seen:
        call(x)
    assert len(seen.launches) == launches
    assert sum(launch.bytes for launch in seen.launches) == pytest.approx(moved_mib * MIB, abs=8)
