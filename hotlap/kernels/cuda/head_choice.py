"""How the loss is computed on CUDA: a rule that needs sizes only, neither a device nor Triton.

`install` follows it and the run's header states what it chose and why.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, NamedTuple

from hotlap.kernels.chunked_loss import DEFAULT_CHUNK_TOKENS

# Share of the device's memory that the full logits and their gradient may take. Weights, optimizer state and
# activations need the rest.
FULL_LOGITS_SHARE = 1 / 4
# Upper bounds of a chunk's logits: large enough that a step has few launches, and little beside activations.
MOST_CHUNK_BYTES = 2**30
CHUNK_SHARE = 1 / 16
LEAST_CHUNK_TOKENS = 128  # fewer rows do not fill the tiles of a matmul

GIB = 2**30


class HeadChoice(NamedTuple):
    how: Literal[
        "full", "triton", "torch"
    ]  # full logits in the compiled graph, or chunks by Triton or PyTorch
    chunk_tokens: int  # whose logits exist at the same time
    logits_bytes: int  # peak memory of logits and of their gradients
    description: str  # for the run's header


def choose_head(
    *,
    memory_bytes: int,
    tokens: int,
    vocabulary: int,
    element_bytes: int,
    compiled: bool,
    no_triton: str | None,
) -> HeadChoice:
    """Full logits where the compiler fuses them and memory allows, else chunks.

    `tokens` go through the head at once, with activations of `element_bytes`. `compiled`: the loss is part of
    a compiled graph. `no_triton`: why the kernel in Triton cannot run, or None.
    """
    full_bytes = full_logits_bytes(tokens, vocabulary, element_bytes)
    sizes = f"{full_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB"
    if compiled and full_bytes <= memory_bytes * FULL_LOGITS_SHARE:
        return HeadChoice("full", tokens, full_bytes, f"full logits, fused by the compiler ({sizes})")
    if no_triton:
        # PyTorch's passes need two buffers in float32.
        chunk = min(tokens, DEFAULT_CHUNK_TOKENS)
        chunk_bytes = 2 * chunk * vocabulary * max(4, element_bytes)
        return HeadChoice("torch", chunk, chunk_bytes, f"chunked PyTorch ({no_triton})")
    chunk = min(tokens, triton_chunk_tokens(memory_bytes, vocabulary, element_bytes))
    reason = f"full logits would take {sizes}" if compiled else "not compiled"
    return HeadChoice(
        "triton",
        chunk,
        chunk * vocabulary * element_bytes,  # the gradient overwrites the logits
        f"Triton, chunks of {chunk:,} tokens ({reason})",
    )


def full_logits_bytes(tokens: int, vocabulary: int, element_bytes: int) -> int:
    """Logits, which the forward pass saves, and their gradient."""
    return 2 * tokens * vocabulary * element_bytes


def triton_chunk_tokens(memory_bytes: int, vocabulary: int, element_bytes: int) -> int:
    """The largest power of two whose logits stay within the bounds, and at least LEAST_CHUNK_TOKENS."""
    most_bytes = min(MOST_CHUNK_BYTES, int(memory_bytes * CHUNK_SHARE))
    fitting = max(1, most_bytes // (vocabulary * element_bytes))
    return max(LEAST_CHUNK_TOKENS, 1 << (fitting.bit_length() - 1))


def no_triton() -> str | None:
    """Why no kernel in Triton can run here, or None."""
    return None if importlib.util.find_spec("triton") else "Triton is not installed"
