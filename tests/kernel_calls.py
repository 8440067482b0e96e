"""Every kernel in C, called with odd sizes on 1, 2 and 3 threads.

`python -m tests.kernel_calls results.pt [blas.so]` saves what they return, for a test to compare
with another process; with a library, the kernels get their BLAS from it and not from torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from hotlap.kernels.cpu import attention, head, library, mlp, newton_schulz, qkv, row_rms

NUM_TOKENS = (1, 3, 65, 127)
THREADS = (1, 2, 3)
COEFFICIENTS = [(3.4445, -4.775, 2.0315)] * 5


class Sizes(NamedTuple):
    """Heads of queries, of keys and values, their size, width, hidden features, vocabulary."""

    H: int
    G: int
    D: int
    C: int
    F: int
    V: int


# Of vectors of 4, 8 and 16: less than one, parts of one, whole ones.
SIZES = (
    Sizes(1, 1, 2, 1, 1, 1),
    Sizes(3, 1, 6, 7, 13, 33),
    Sizes(5, 5, 20, 33, 70, 131),
    Sizes(6, 3, 16, 48, 64, 64),
)
SEVERAL_CHUNKS = (
    (mlp, "CHUNK_FEATURES", 1),
    (mlp, "LEAST_CHUNK_TOKENS", 1),
    (qkv, "MOST_CHUNK_TOKENS", 13),
)


def of_attention(T: int, s: Sizes) -> Iterator[Tensor]:
    q, k, v, grad = (torch.randn(T, heads, s.D) for heads in (s.H, s.G, s.G, s.H))
    tokens = torch.arange(T)
    for first_key in (torch.zeros(T), (tokens - 20).clamp(min=0), tokens // 50 * 50, tokens):
        out, log_sums = attention.forward(q, k, v, first_key.int(), 0.3)
        yield from (out, log_sums)
        yield from attention.backward(grad, q, k, v, first_key.int(), out, log_sums, 0.3)


def of_qkv(T: int, s: Sizes) -> Iterator[Tensor]:
    none, stream = torch.empty(0), (T, s.C)
    weights = [torch.randn(heads * s.D, s.C) for heads in (s.H, s.G, s.G)]
    for skips, mixes_in in product((False, True), repeat=2):
        given = qkv.Given(
            *torch.randn(2, *stream),
            torch.randn(stream) if skips else none,
            torch.randn(3 if skips else 2),
            *weights,
            *torch.randn(2, T, 1, s.D // 2),
            torch.randn(2),
            torch.randn(T, s.G, s.D) if mixes_in else none,
        )
        made = qkv.forward(given)
        grads = [torch.randn(T, heads, s.D) for heads in (s.H, s.G, s.G)]
        received = qkv.Received(torch.randn(stream), *grads)
        yield from made
        yield from qkv.backward(given, made._replace(mixed=none, v=none), received)


def of_mlp(T: int, s: Sizes) -> Iterator[Tensor]:
    none, x, features = torch.empty(0), torch.randn(T, s.C), s.H * s.D
    expand, out = torch.randn(s.F, s.C) / 7, torch.randn(s.C, s.F) / 7
    for attended, project in ((none, none), (torch.randn(T, features), torch.randn(s.C, features) / 7)):
        given = mlp.Given(x, attended, project, expand, out)
        made = mlp.forward(given)
        yield from made
        given = given._replace(x=made.sum if made.sum.numel() else x)
        yield from mlp.backward(torch.randn(T, s.C), given, made.inverse_rms, made.hidden)


def of_head(T: int, s: Sizes) -> Iterator[Tensor]:
    x, weight, targets = torch.randn(T, s.C), torch.randn(s.V, s.C) / 7, torch.randint(s.V, (T,))
    for needs_grad in (True, False):
        yield from head.loss_and_gradients(x, weight, targets, 15.0, 0.5, needs_grad)
    logits = torch.randn(T, s.V)
    yield from head.rows(logits, targets, 15.0)
    yield logits


def of_newton_schulz(T: int, s: Sizes) -> Iterator[Tensor]:
    for shape, (first, others) in product(
        ((1, s.C, s.F), (4, s.F, s.C), (2, T, T)), ((1, 1), (3, 2), (9, 1))
    ):
        yield newton_schulz.orthogonalize(torch.randn(shape), COEFFICIENTS, first, others, 1e-7)


def of_row_rms(T: int, s: Sizes) -> Iterator[Tensor]:
    table, grad, squares = torch.randn(T, s.C), torch.randn(T, s.C), torch.rand(T, s.C)
    grad[::2] = 0
    row_rms.step_rows(table, grad, squares, 0.1, 0.9, 0.5, 1e-8)
    yield from (table, squares)


KERNELS = (of_attention, of_qkv, of_mlp, of_head, of_newton_schulz, of_row_rms)


def results() -> dict[str, list[Tensor]]:
    for module, name, value in SEVERAL_CHUNKS:
        setattr(module, name, value)
    found = {}
    for kernel, sizes, num_tokens, threads in product(KERNELS, SIZES, NUM_TOKENS, THREADS):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        head.CHUNK_LOGITS = 13 * sizes.V
        found[f"{kernel.__name__} {sizes} T={num_tokens} {threads} threads"] = list(kernel(num_tokens, sizes))
    return found


def take_blas_from(path: str) -> object:
    """Functions by the names that library.py looks for in torch. Returns what keeps them loaded."""
    blas = library.cffi.FFI()
    blas.cdef("".join(f"void {name}(void);" for name in library.BLAS_FUNCTIONS))
    functions = blas.dlopen(path)
    library.needed_library().hotlap_set_blas(
        *(library.ffi.cast(kind, getattr(functions, name)) for name, kind in library.BLAS_FUNCTIONS.items())
    )
    return functions


if __name__ == "__main__":
    blas = take_blas_from(sys.argv[2]) if len(sys.argv) > 2 else None
    torch.save(results(), sys.argv[1])
