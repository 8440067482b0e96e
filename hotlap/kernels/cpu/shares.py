"""How the threads of a kernel divide its tokens, and with them the gradients of weights."""

from __future__ import annotations

import torch
from torch import Tensor

# With fewer, a thread's matmuls are too short to be fast.
LEAST_TOKENS_A_THREAD = 256


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def num_threads() -> int:
    return torch.get_num_threads()


def chunk_tokens(num_tokens: int, most: int) -> int:
    """Tokens per chunk, at most `most`.

    A thread's tokens are divided into chunks of equal size, of which only the last may be a little
    shorter: a chunk of a few tokens would cost a pass over all weights.
    """
    share = -(-num_tokens // num_threads())
    chunks = max(1, -(-share // most))
    return max(1, -(-share // chunks))


def least_tokens_a_share(rows: int, cols: int) -> int:
    """Tokens per thread for which adding up the threads' gradients costs much less than matmuls."""
    return max(LEAST_TOKENS_A_THREAD, min(rows, cols))


def pays_to_share(x_TC: Tensor, weight: Tensor) -> bool:
    """Whether every thread has enough tokens to sum gradients of its own; true for one thread."""
    threads = num_threads()
    return threads == 1 or len(x_TC) >= threads * least_tokens_a_share(*weight.shape)
