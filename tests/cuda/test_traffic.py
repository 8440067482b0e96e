"""What compiled kernels move: the loss with full logits at the records' size, and the count itself."""

from typing import Any

import pytest
import torch

from hotlap.emulation import call
from hotlap.emulation.kernel_traffic import moved_bytes
from hotlap.kernels.cuda.head_traffic import Traffic

TOKENS, WIDTH, VOCABULARY = 65_536, 768, 50_304
LOGITS_BYTES = TOKENS * VOCABULARY * 2  # in bfloat16


def test_full_logits_stay_below_60_launches_and_45_gb_outside_matmuls() -> None:
    sizes = {"tokens": TOKENS, "width": WIDTH, "vocabulary": VOCABULARY}
    found = Traffic(**call("hotlap.emulation.head:full_logits_traffic", **sizes, softcap=15.0, gpu="H100"))
    print(found)
    assert found.matmuls == 3
    assert found.launches <= 60
    # Five passes over the logits, as the compiler's kernels are written.
    assert 5 * LOGITS_BYTES < found.bytes_outside_matmuls < 5.2 * LOGITS_BYTES < 45e9
    assert found.bytes_of_matmuls > 3 * LOGITS_BYTES


def kernel(*accesses: str, name: str = "triton_red_fused_0") -> str:
    lines = "\n".join(f"    {access}" for access in accesses)
    names = "in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr"
    called = "@triton.jit\ndef _triton_helper_fn_add0(arg0_0, arg1_0):\n    return arg0_0 + arg1_0\n"
    return f"{called}@triton.jit\ndef {name}({names}):\n    xnumel = 8\n{lines}\n"


def arguments_of_a_kernel() -> tuple[Any, ...]:
    rows = torch.empty(8, 1024, dtype=torch.bfloat16)
    return rows, torch.empty(8, dtype=torch.int64), torch.empty(8), 8, 1024


ROWS = "tmp0 = tl.load(in_ptr0 + (r0_1 + 1024*x0), r0_mask & xmask, other=0.0).to(tl.float32)"
PER_ROW = "tmp1 = tl.load(in_ptr1 + (x0), xmask, eviction_policy='evict_last')"
GATHERED = "tmp2 = tl.load(in_ptr0 + (tmp1 + 1024*x0), xmask)"


@pytest.mark.parametrize(
    ("accesses", "moved"),
    [
        ([ROWS], 8 * 1024 * 2),
        ([ROWS, ROWS], 2 * 8 * 1024 * 2),  # in two loops
        ([PER_ROW], 8 * 8),
        ([PER_ROW, GATHERED], 8 * 8 + 8 * 2),  # one element per row, not all of them
        (["tl.store(out_ptr0 + (x0), tmp0, xmask)"], 8 * 4),
        (["tl.atomic_add(out_ptr0 + (tmp1 + x0), tmp0, xmask)"], 2 * 8 * 4),
    ],
)
def test_loads_and_stores_of_a_kernel_are_counted(accesses: list[str], moved: int) -> None:
    assert moved_bytes(kernel(*accesses), arguments_of_a_kernel()) == moved


def test_a_kernel_for_a_list_of_tensors_moves_each_whole() -> None:
    source = (
        "@triton.jit\ndef triton_for_fused_0(in_ptr0, out_ptr0):\n    tmp0 = tl.load(in_ptr0 + (x0), None)\n"
    )
    assert moved_bytes(source, (torch.empty(100), torch.empty(100))) == 400


def test_a_template_moves_each_of_its_tensors_once() -> None:
    source = kernel("K = arg_K", "k = tl.load(K + offsets)", name="triton_tem_fused_flex_attention_0")
    assert moved_bytes(source, arguments_of_a_kernel()) == 8 * 1024 * 2 + 8 * 8 + 8 * 4
