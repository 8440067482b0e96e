"""Whether attention's kernels fit a GPU: their shared memory per thread block, found by compiling them.

FlexAttention chooses its tiles by compute capability, dtype and head dim. The bytes are what Triton 3.7.1
gave the kernels of torch 2.13; `hotlap.emulation.cubins` compiles them, and a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotlap.config import Config
from hotlap.plan.machine import Machine

# {(compute capability, dtype, head dim): (forward, backward)}, bytes
SHARED_MEMORY_BYTES = {
    ((8, 9), "bfloat16", 128): (98_816, 68_352),
    ((8, 9), "float32", 128): (148_224, 33_792),
    ((9, 0), "bfloat16", 128): (132_096, 165_888),
}


@dataclass(frozen=True)
class KernelFit:
    """Of FlexAttention. Bytes are those of shared memory per thread block; None: not known."""

    forward_bytes: int | None
    backward_bytes: int | None
    limit_bytes: int
    advice: str  # what to choose if they do not fit

    @property
    def fits(self) -> bool | None:
        if self.forward_bytes is None or self.backward_bytes is None:
            return None
        return max(self.forward_bytes, self.backward_bytes) <= self.limit_bytes


def attention_kernels(config: Config, machine: Machine, dtype: torch.dtype) -> KernelFit | None:
    """None without FlexAttention: on a CPU, with another backend, and for GPT-2."""
    uses_flex = config.attention.backend in ("auto", "flex") and config.model.architecture != "gpt2"
    if machine.gpu is None or not uses_flex:
        return None
    name = str(dtype).removeprefix("torch.")
    key = (machine.gpu.capability, name, config.model.head_dim)
    forward, backward = SHARED_MEMORY_BYTES.get(key, (None, None))
    advice = (
        "use --precision bfloat16, or --attention.backend blocked"
        if dtype == torch.float32
        else "use --attention.backend blocked"
    )
    return KernelFit(forward, backward, machine.gpu.shared_memory_bytes, advice)
