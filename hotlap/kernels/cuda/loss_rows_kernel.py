"""The Triton kernel behind `loss_rows`. Imported when it is first called: Triton is not installed everywhere.

Exponentials are to base 2, the one that GPUs have in hardware. With a softcap s and r = sigmoid(−2z/s), a
logit z becomes s·tanh(z/s) = s − 2s·r, whose derivative is 4·(r − r²). The constant s cancels in a softmax,
so that the exponent of a column is −2s·log2(e)·r; without a softcap it is log2(e)·z.
"""

import triton
import triton.language as tl
from torch import Tensor

LARGEST_BLOCK = 4096  # columns that a program holds in registers at once
NUM_WARPS = 8  # with that block, 16 columns per thread: two loads of 16 bytes in bfloat16

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # finite: a difference of two infinities would be NaN


def launch(
    logits_cV: Tensor,
    targets_c: Tensor,
    losses_c: Tensor,
    softcap: float,
    factor: float,
    needs_maximum: bool,
    needs_grad: bool,
) -> None:
    """One program per row. Arguments as in `loss_rows`, which has checked them."""
    rows, vocabulary = logits_cV.shape
    loss_rows_kernel[(rows,)](
        *(logits_cV, targets_c, losses_c, vocabulary, softcap, factor),
        has_softcap=softcap > 0,
        needs_maximum=needs_maximum,
        needs_grad=needs_grad,
        block=min(LARGEST_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=NUM_WARPS,
    )


@triton.jit
def loss_rows_kernel(
    logits,
    targets,
    losses,
    vocabulary,
    softcap,
    factor,
    has_softcap: tl.constexpr,
    needs_maximum: tl.constexpr,
    needs_grad: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row · vocabulary may exceed 32 bits
    logits += row * vocabulary
    target = tl.load(targets + row)
    offsets = tl.arange(0, block)

    # First pass. Each lane keeps its own maximum and sum, so that threads exchange them once, at the end.
    maxima = tl.full((block,), LOWEST if needs_maximum else 0.0, tl.float32)
    sums = tl.zeros((block,), tl.float32)
    target_exponents = tl.zeros((block,), tl.float32)  # zero but in the target's lane
    for start in range(0, vocabulary, block):
        columns = start + offsets
        exponents, _ = _exponents_and_slopes(_load(logits, columns, vocabulary), softcap, has_softcap)
        target_exponents += tl.where(columns == target, exponents, 0.0)
        exponents = tl.where(columns < vocabulary, exponents, float("-inf"))
        if needs_maximum:
            larger = tl.maximum(maxima, exponents)
            sums *= tl.exp2(maxima - larger)
            maxima = larger
        sums += tl.exp2(exponents - maxima)
    maximum = tl.max(maxima, axis=0)
    sum_of_row = tl.sum(sums * tl.exp2(maxima - maximum), axis=0)
    loss = (tl.log2(sum_of_row) + maximum - tl.sum(target_exponents, axis=0)) / LOG2_E
    # No column equals a target outside the vocabulary: its loss must not pass for one.
    loss = tl.where((target >= 0) & (target < vocabulary), loss, float("nan"))
    tl.store(losses + row, loss * factor)

    # Second pass, over logits of which a part is still in the second-level cache.
    if needs_grad:
        for start in range(0, vocabulary, block):
            columns = start + offsets
            exponents, slopes = _exponents_and_slopes(
                _load(logits, columns, vocabulary), softcap, has_softcap
            )
            probabilities = tl.exp2(exponents - maximum) * (1.0 / sum_of_row)
            gradients = (probabilities - tl.where(columns == target, 1.0, 0.0)) * slopes * factor
            tl.store(logits + columns, gradients.to(logits.dtype.element_ty), mask=columns < vocabulary)


@triton.jit
def _load(logits, columns, vocabulary):
    return tl.load(logits + columns, mask=columns < vocabulary, other=0.0).to(tl.float32)


@triton.jit
def _exponents_and_slopes(z, softcap, has_softcap: tl.constexpr):
    """Base-2 exponents of the capped logits, and the derivative of the softcap."""
    if has_softcap:
        r = 1.0 / (1.0 + tl.exp2(z * (2.0 * LOG2_E / softcap)))
        return r * (-2.0 * LOG2_E * softcap), 4.0 * (r - r * r)
    else:
        return z * LOG2_E, tl.full(z.shape, 1.0, tl.float32)
