"""Orthogonalisation by Newton-Schulz iteration: every singular value is driven towards one, by matmuls only.

Pure functions of one matrix or a stack of equal ones. Inputs are divided by their Frobenius norm first, so a
singular value s below means s / norm. Five steps promise, for s >= 0.0015: 0.68 to 1.21 with the quintic
coefficients, 0.87 to 1.13 with Polar Express. Smaller ones grow but stay below; zero stays zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hotlap.errors import OptimizerError

Coefficients = tuple[tuple[float, float, float], ...]
CoefficientKind = Literal["quintic", "polar-express"]
Form = Literal["auto", "plain", "gram"]

SMALLEST_NORM = 1e-7

# One step maps each singular value s to a·s + b·s³ + c·s⁵.
_QUINTIC = (3.4445, -4.7750, 2.0315)

# Amsel, Persson, Musco, Gower (2025): each step's polynomial is the best one for the interval that the steps
# before it leave.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
# Rounding may push a singular value just over the interval's end, where the next polynomial turns steep.
_SAFETY = 1.01

# Columns per row from which the Gram form needs fewer multiplications than the plain one: a segment of k
# steps costs k(2r+1) products of rows³ in the plain form and 2r+4k-3 in the Gram form, for r columns per row.
_GRAM_PAYS_FROM = 1.5
# The Gram matrix squares the condition number: on its own for five steps it is 1e-4 off in float32 where
# small singular values abound. Formed anew after two steps, which lift those, it is as exact as plain.
GRAM_FIRST_SEGMENT = 2
GRAM_SEGMENT = 3

# The iteration goes over a slice some fifteen times; larger ones than this fall out of a core's cache. But a
# call for fewer than two matrices a thread takes longer to begin than that loses.
_CPU_SLICE_BYTES = 512 * 1024
_LEAST_MATRICES_A_THREAD = 2


def step_coefficients(kind: CoefficientKind, steps: int) -> Coefficients:
    """(a, b, c) for each of `steps` steps; a list that is too short goes on with its last entry."""
    if steps < 1:
        raise OptimizerError(
            expected="at least one Newton-Schulz step", found=f"{steps}", do="the usual number is 5"
        )
    if kind == "quintic":
        return (_QUINTIC,) * steps
    assert kind == "polar-express", f"unknown coefficients {kind!r}"
    listed = _POLAR_EXPRESS[:steps] + _POLAR_EXPRESS[-1:] * (steps - len(_POLAR_EXPRESS))
    damped = tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in listed[:-1])
    return damped + listed[-1:]


def working_dtype(matrices: Tensor) -> torch.dtype:
    """bfloat16 on CUDA, where it is fast; elsewhere float32, or float64 if the input is."""
    if matrices.is_cuda:
        return torch.bfloat16
    return torch.float64 if matrices.dtype == torch.float64 else torch.float32


def orthogonalize(
    matrices: Tensor, coefficients: Coefficients, *, dtype: torch.dtype | None = None, form: Form = "auto"
) -> Tensor:
    """The nearly orthogonal factor of each matrix of (rows, cols) or (count, rows, cols), in `dtype`.

    `form` picks the order of the products: "auto" is the Gram form for long rectangles in float32 and float64
    (in bfloat16 its rounding would show), else the plain one.
    """
    assert matrices.ndim in (2, 3), f"one matrix or a stack of them expected, found shape {matrices.shape}"
    dtype = dtype or working_dtype(matrices)
    stacked = matrices if matrices.ndim == 3 else matrices.unsqueeze(0)
    is_tall = stacked.shape[-2] > stacked.shape[-1]
    wide = _unit_norm((stacked.mT if is_tall else stacked).to(dtype))
    if form == "auto":
        form = "gram" if gram_pays(stacked.shape[-2:], dtype) else "plain"
    iterate = _iterate_gram if form == "gram" else _iterate_plain
    slices = [iterate(part, coefficients) for part in wide.split_with_sizes(_slice_counts(wide))]
    result = slices[0] if len(slices) == 1 else torch.cat(slices)
    return (result.mT if is_tall else result).reshape(matrices.shape)


def gram_pays(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether the Gram form is the faster one for matrices of `shape`, and as exact in `dtype`."""
    short, long = sorted(shape)
    return long >= _GRAM_PAYS_FROM * short and dtype != torch.bfloat16


def _slice_counts(stacked: Tensor) -> list[int]:
    """How many matrices to iterate on at a time: all, but on a CPU what its caches hold, as many a thread."""
    count = stacked.shape[0]
    if stacked.device.type != "cpu" or count == 0:
        return [count]
    matrix_bytes = max(1, stacked[0].numel() * stacked.element_size())
    a_thread = _CPU_SLICE_BYTES // matrix_bytes // torch.get_num_threads()
    at_once = torch.get_num_threads() * max(_LEAST_MATRICES_A_THREAD, a_thread)
    return [min(at_once, count - start) for start in range(0, count, at_once)]


def _unit_norm(x: Tensor) -> Tensor:
    """x over its Frobenius norm, clamped. The largest entry goes first, or squares of 1e30 would overflow."""
    largest = x.abs().amax(dim=(-2, -1), keepdim=True).clamp_(min=SMALLEST_NORM)
    scaled = x / largest
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    return scaled.div_(torch.maximum(norm, SMALLEST_NORM / largest))


def _iterate_plain(x: Tensor, coefficients: Coefficients) -> Tensor:
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _iterate_gram(x: Tensor, coefficients: Coefficients) -> Tensor:
    """The same iteration, a few steps at a time on the small side only: x enters once a segment."""
    first, rest = coefficients[:GRAM_FIRST_SEGMENT], coefficients[GRAM_FIRST_SEGMENT:]
    segments = [first, *(rest[i : i + GRAM_SEGMENT] for i in range(0, len(rest), GRAM_SEGMENT))]
    for segment in segments:
        gram = torch.bmm(x, x.mT)
        product: Tensor | None = None
        for position, (a, b, c) in enumerate(segment):
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            product = polynomial if product is None else torch.bmm(product, polynomial)
            if position < len(segment) - 1:
                gram = torch.bmm(torch.bmm(gram, polynomial), polynomial)
        x = x if product is None else torch.bmm(product, x)
    return x
