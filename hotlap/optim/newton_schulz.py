"""Newton-Schulz orthogonalization: matmuls alone drive every singular value toward 1.

Pure functions of one matrix or of a stack of matrices of one shape. The input is first divided by
its Frobenius norm, so a singular value s means s / norm here. After five steps a singular value
s ≥ 0.0015 lies in [0.68, 1.21] with the quintic coefficients of Muon
(https://kellerjordan.github.io/posts/muon/) and in [0.87, 1.13] with Polar Express
(https://arxiv.org/abs/2505.16932). A smaller one grows but may stay below that range; 0 stays 0.
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

# Polar Express (Amsel, Persson, Musco, Gower 2025): the polynomial of each step is optimal for the
# interval of singular values that the previous steps leave.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
# Rounding can push a singular value just past the end of the interval, where the next polynomial is
# steep. Dividing the singular values by this factor keeps them inside.
_SAFETY = 1.01

# Aspect ratio from which the Gram form needs fewer FLOPs than the plain form. With r = cols / rows,
# a segment of k steps costs as much as k(2r + 1) matmuls of (rows, rows) matrices in the plain form
# and 2r + 4k − 3 in the Gram form.
_MIN_GRAM_ASPECT = 1.5
# The Gram matrix squares the condition number. Iterating on it alone for five steps has an error of
# 1e-4 in float32 if many singular values are small. The first steps raise those, so recomputing the
# Gram matrix after the first segment makes the result as accurate as the plain form.
GRAM_FIRST_SEGMENT = 2
GRAM_SEGMENT = 3

# The iteration reads a slice of the stack many times, so the slice should fit in the CPU's cache.
# With too few matrices per thread, the overhead of the call outweighs that.
_CPU_SLICE_BYTES = 512 * 1024
_MIN_MATRICES_PER_THREAD = 2


def step_coefficients(kind: CoefficientKind, steps: int) -> Coefficients:
    """(a, b, c) per step. Steps beyond the end of the Polar Express list repeat its last entry."""
    if steps < 1:
        raise OptimizerError(
            expected="at least one Newton-Schulz step", found=f"{steps}", do="use 5, the usual number"
        )
    if kind == "quintic":
        return (_QUINTIC,) * steps
    assert kind == "polar-express", f"unknown coefficients {kind!r}"
    listed = _POLAR_EXPRESS[:steps] + _POLAR_EXPRESS[-1:] * (steps - len(_POLAR_EXPRESS))
    damped = tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in listed[:-1])
    return damped + listed[-1:]


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA, where it is fast. Elsewhere float32, or float64 for float64 input."""
    if device.type == "cuda":
        return torch.bfloat16
    return torch.float64 if dtype == torch.float64 else torch.float32


def orthogonalize(
    matrices: Tensor, coefficients: Coefficients, *, dtype: torch.dtype | None = None, form: Form = "auto"
) -> Tensor:
    """The approximate polar factor U·Vᵀ of each matrix of ([count,] rows, cols), in `dtype`.

    `form` selects the order of the matmuls. "auto" uses the Gram form for elongated matrices in
    float32 and float64, and the plain form otherwise: in bfloat16 the Gram form loses accuracy.
    """
    assert matrices.ndim in (2, 3), f"expected (rows, cols) or (count, rows, cols), found {matrices.shape}"
    dtype = dtype or working_dtype(matrices.dtype, matrices.device)
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
    """Whether the Gram form is faster for matrices of `shape` and as accurate in `dtype`."""
    short, long = sorted(shape)
    return long >= _MIN_GRAM_ASPECT * short and dtype != torch.bfloat16


def flops_per_step(rows: int, cols: int) -> int:
    """FLOPs of one step on one matrix in the plain form: X·Xᵀ, its square, and the product with X."""
    short, long = sorted((rows, cols))
    return 4 * short**2 * long + 2 * short**3


def _slice_counts(stacked: Tensor) -> list[int]:
    """Matrices per slice of the stack: one slice, or on a CPU slices that fit in cache, unless compiled."""
    count = stacked.shape[0]
    if stacked.device.type != "cpu" or count == 0 or torch.compiler.is_compiling():
        return [count]
    matrix_bytes = max(1, stacked[0].numel() * stacked.element_size())
    per_thread = _CPU_SLICE_BYTES // matrix_bytes // torch.get_num_threads()
    at_once = torch.get_num_threads() * max(_MIN_MATRICES_PER_THREAD, per_thread)
    return [min(at_once, count - start) for start in range(0, count, at_once)]


def _unit_norm(x: Tensor) -> Tensor:
    """x / max(its Frobenius norm, SMALLEST_NORM), per matrix.

    Divides by the largest entry first, because the square of a large entry can overflow.
    """
    largest = x.abs().amax(dim=(-2, -1), keepdim=True).clamp_(min=SMALLEST_NORM)
    scaled = x / largest
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    return scaled.div_(torch.maximum(norm, SMALLEST_NORM / largest))


def _iterate_plain(x: Tensor, coefficients: Coefficients) -> Tensor:
    """x ← a·x + (b·G + c·G²)·x with G = x·xᵀ, per step. x is (count, rows, cols), rows ≤ cols."""
    for a, b, c in coefficients:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _iterate_gram(x: Tensor, coefficients: Coefficients) -> Tensor:
    """The same iteration, on (rows, rows) matrices within a segment of steps.

    Each step multiplies x by a polynomial P of G = x·xᵀ, which turns G into P·G·P. A segment
    therefore iterates on G and multiplies x by the combined polynomial once.
    """
    first, rest = coefficients[:GRAM_FIRST_SEGMENT], coefficients[GRAM_FIRST_SEGMENT:]
    segments = [first, *(rest[i : i + GRAM_SEGMENT] for i in range(0, len(rest), GRAM_SEGMENT))]
    for segment in segments:
        gram = torch.bmm(x, x.mT)
        transform: Tensor | None = None
        for position, (a, b, c) in enumerate(segment):
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            transform = polynomial if transform is None else torch.bmm(transform, polynomial)
            if position < len(segment) - 1:
                gram = torch.bmm(torch.bmm(gram, polynomial), polynomial)
        x = x if transform is None else torch.bmm(transform, x)
    return x
