"""Gradients of weights as a sum of shares: each thread's, over its own tokens."""

from __future__ import annotations

import torch
from torch import Tensor

# With fewer, a thread's product is too short to be fast.
LEAST_TOKENS_A_THREAD = 256


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def num_threads() -> int:
    return torch.get_num_threads()


def least_tokens_a_share(rows: int, cols: int) -> int:
    """Adding up the shares of a weight is a pass over each of them, to be much less than the products."""
    return max(LEAST_TOKENS_A_THREAD, min(rows, cols))


def pays_to_share(x_TC: Tensor, weight: Tensor) -> bool:
    """Whether every thread has tokens enough for a share of its own; one thread has nothing to add up."""
    threads = num_threads()
    return threads == 1 or len(x_TC) >= threads * least_tokens_a_share(*weight.shape)
