"""Whether attention's kernels fit a GPU, by the rule that a run follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotlap.config import Config
from hotlap.kernels.cuda.flex_limits import LARGEST_HEAD_DIM
from hotlap.plan.machine import Machine


@dataclass(frozen=True)
class KernelFit:
    """Of FlexAttention in the shared memory of a thread block."""

    head_dim: int
    largest_head_dim: int | None  # that fits; None: not known for this GPU
    advice: str  # what to choose if it does not fit

    @property
    def fits(self) -> bool | None:
        return None if self.largest_head_dim is None else self.head_dim <= self.largest_head_dim


def attention_kernels(config: Config, machine: Machine, dtype: torch.dtype) -> KernelFit | None:
    """None without FlexAttention: on a CPU, with another backend, and for GPT-2."""
    uses_flex = config.attention.backend in ("auto", "flex") and config.model.architecture != "gpt2"
    if machine.gpu is None or not uses_flex:
        return None
    largest = LARGEST_HEAD_DIM.get(machine.gpu.capability, {}).get(dtype)
    advice = (
        "use --precision bfloat16, or --attention.backend blocked"
        if dtype == torch.float32
        else "use --attention.backend blocked"
    )
    return KernelFit(config.model.head_dim, largest, advice)
