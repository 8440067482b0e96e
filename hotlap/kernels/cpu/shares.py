"""How the threads of a kernel divide its tokens, and with them the gradients of weights."""

from __future__ import annotations

import torch
from torch import Tensor

# With fewer, a thread's matmuls are too short to be fast.
LEAST_TOKENS_PER_THREAD = 256


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


def least_tokens(rows: int, cols: int) -> int:
    """From how many tokens a kernel with a weight of (rows, cols) pays.

    Threads sum the weight's gradient over their own tokens and add it up at the end. That must cost much less
    than the matmuls; one thread has nothing to add up.
    """
    threads = num_threads()
    return 1 if threads == 1 else threads * max(LEAST_TOKENS_PER_THREAD, min(rows, cols))


def token_parts(x_TC: Tensor) -> int:
    """How many equal runs of tokens a matmul is cut into: one per thread, or 1 where that would not pay.

    A pass over activations gives each thread a run of tokens, and what a thread has written is in its own
    core's cache. A library's matmul over all tokens may cut elsewhere and fetch half of its operands from the
    other core, which takes up to twice as long.
    """
    threads = num_threads()
    cut = x_TC.device.type == "cpu" and len(x_TC) % threads == 0
    return threads if cut and len(x_TC) >= threads * LEAST_TOKENS_PER_THREAD else 1
