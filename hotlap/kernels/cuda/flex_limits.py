"""Whether FlexAttention's kernels fit in the shared memory of a GPU, known before anything is compiled.

Inductor chooses their tiles by GPU, dtype and head dim. A thread block that needs more shared memory than the
GPU has cannot be launched, which a run would only notice after minutes of compiling. What is stated here is
computed by compiling the kernels for each GPU (`hotlap.emulation.cubins`); tests/cuda/test_cubins.py does it
again.
"""

from __future__ import annotations

import torch

from hotlap.errors import DeviceError

# Largest power-of-two head dim whose forward and backward kernels fit, by compute capability.
LARGEST_HEAD_DIM: dict[tuple[int, int], dict[torch.dtype, int]] = {
    (8, 0): {torch.bfloat16: 256, torch.float32: 256},
    (8, 6): {torch.bfloat16: 128, torch.float32: 64},
    (8, 9): {torch.bfloat16: 128, torch.float32: 64},
    (9, 0): {torch.bfloat16: 256, torch.float32: 256},
    (10, 0): {torch.bfloat16: 256, torch.float32: 256},
    (12, 0): {torch.bfloat16: 128, torch.float32: 128},
}


def check_flex_fits(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> None:
    """Refuse a head dim that flex cannot do in this precision on a GPU of this compute capability.

    A GPU that is not in the table is let through.
    """
    largest = LARGEST_HEAD_DIM.get(capability, {})
    if head_dim <= largest.get(dtype, head_dim):
        return
    major, minor = capability
    fits_bfloat16 = head_dim <= largest.get(torch.bfloat16, 0)
    narrower = "use --precision bfloat16 or " if fits_bfloat16 and dtype != torch.bfloat16 else "use "
    raise DeviceError(
        expected=f"a head dim of at most {largest[dtype]} for flex attention in"
        f" {str(dtype).removeprefix('torch.')} on a GPU of compute capability {major}.{minor}",
        found=f"{head_dim}, whose kernels need more shared memory than it has",
        do=f"{narrower}--attention.backend blocked, or more heads",
    )
