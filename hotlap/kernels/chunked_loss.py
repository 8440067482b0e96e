"""The loss without the T×V logits: matmul, softcap and cross entropy, some tokens at a time.

A chunk's gradients are computed right after its loss, while its logits are in cache, so the backward pass
only scales them. Computes what `hotlap.model.head.cross_entropy` does, on every device and in every dtype.
On a CPU the passes over a chunk's logits, or all of it, may be kernels in C; on CUDA the passes are one
kernel in Triton.

Shapes: T tokens, C model width, V vocabulary, c tokens of a chunk.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from hotlap.kernels.cpu import head as kernel
from hotlap.kernels.cpu.shares import token_parts
from hotlap.kernels.cuda.loss_rows import loss_rows
from hotlap.kernels.derivatives import first_derivative_only

DEFAULT_CHUNK_TOKENS = 512
# exp(softcap · tanh) spans exp(±softcap). Up to here its smallest value is far from float32's smallest, so
# that no row needs its maximum subtracted. The kernels in C rely on that.
LARGEST_UNSHIFTED_SOFTCAP = 40.0

# Who computes a chunk: PyTorch; PyTorch's matmuls with C ("rows") or Triton for the passes over the logits;
# or C alone ("all").
Passes = Literal["torch", "rows", "triton", "all"]


def chunked_cross_entropy(
    x_TC: Tensor,
    weight_VC: Tensor,
    targets_T: Tensor,
    softcap: float | None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    passes: Passes = "torch",
) -> Tensor:
    """The loss in float32 (float64 for float64), in the memory of one or two chunks of logits."""
    assert reduction in ("mean", "sum"), f"unknown reduction {reduction!r}"
    assert chunk_tokens >= 1, f"a chunk of {chunk_tokens} tokens"
    if passes in ("rows", "all") and not is_unshifted(softcap):
        raise ValueError(
            f"C takes a softcap up to {LARGEST_UNSHIFTED_SOFTCAP:g}, found {softcap}: passes=torch"
        )
    needs_grad = torch.is_grad_enabled() and (x_TC.requires_grad or weight_VC.requires_grad)
    factor = 1 / len(x_TC) if reduction == "mean" else 1.0
    loss: Tensor = _loss(
        x_TC, weight_VC, targets_T, softcap or 0.0, factor, chunk_tokens, needs_grad, passes
    )[0]
    return loss


def is_unshifted(softcap: float | None) -> bool:
    return 0 < (softcap or 0.0) <= LARGEST_UNSHIFTED_SOFTCAP


def loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float,
    factor: float,
    chunk_tokens: int,
    needs_grad: bool,
    passes: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """factor · Σ loss, and its gradients with respect to x and weight (empty unless needed)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    num_tokens, vocabulary = len(x), len(weight)
    weight_used = weight.to(x.dtype)
    grad_x = torch.empty_like(x) if needs_grad else x.new_empty(0)
    # Zeros only without tokens: otherwise the first chunk writes it.
    new_weight = torch.empty_like if num_tokens else torch.zeros_like
    grad_weight = new_weight(weight, dtype=dtype) if needs_grad else x.new_empty(0, dtype=dtype)
    total = x.new_zeros((), dtype=dtype)
    if passes == "rows":
        # One buffer instead of two: twice the tokens in the same memory, half the reads of the weight.
        chunk_tokens *= 2
    # Triton computes in registers. In memory, its logits have the precision of the matmuls.
    buffer_dtype = x.dtype if passes == "triton" else dtype
    first = x.new_empty((min(chunk_tokens, num_tokens), vocabulary), dtype=buffer_dtype)
    second = torch.empty_like(first) if softcap and passes == "torch" else first
    losses_T = x.new_empty(num_tokens if passes == "triton" else 0, dtype=dtype)

    for start in range(0, num_tokens, chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        x_cC, target_c = x[chunk], targets[chunk]
        logits, exponents = first[: len(x_cC)], second[: len(x_cC)]
        row_scale_c1 = None  # the gradient's factors that are not yet in grad_logits
        if passes == "triton":
            torch.mm(x_cC, weight_used.T, out=logits)
            needs_maximum = not is_unshifted(softcap)
            loss_rows(logits, target_c, losses_T[chunk], softcap, factor, needs_maximum, needs_grad)
            grad_logits = logits
        elif passes == "rows":
            _matmul_into(logits, x_cC, weight_used.T, scale=1.0)
            loss_c, row_scale_c = kernel.rows(logits, target_c, softcap)
            total += loss_c.sum()
            grad_logits, row_scale_c1 = logits, row_scale_c[:, None] * factor
        else:
            # The exponentials start from scaled logits; scaling in the matmul saves a pass.
            _matmul_into(logits, x_cC, weight_used.T, scale=-2 / softcap if softcap else 1.0)
            sums_c1, loss_c1 = _exponentials(logits, exponents, target_c[:, None], softcap)
            total += loss_c1.sum()
            if needs_grad:
                grad_logits, row_scale_c1 = _grad_logits(
                    logits, exponents, sums_c1, target_c[:, None], softcap
                )
                row_scale_c1 *= factor
        if needs_grad:
            grad_used = grad_logits.to(x.dtype)
            if row_scale_c1 is None:
                torch.mm(grad_used, weight_used, out=grad_x[chunk])
                scaled_x_cC = x_cC
            else:
                grad_x[chunk] = (grad_used @ weight_used).mul_(row_scale_c1)
                # The row's scale goes to the narrow operand, a pass over c×C instead of c×V.
                scaled_x_cC = (x_cC * row_scale_c1).to(x.dtype)
            _accumulate(grad_weight, grad_used.T, scaled_x_cC, is_first=start == 0)
    loss = losses_T.sum() if passes == "triton" else total * factor
    return loss, grad_x, grad_weight.to(weight.dtype)


def _exponentials(
    logits: Tensor, exponents: Tensor, target_c1: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """Leave a multiple of exp(capped logits) in `exponents`. Returns each row's sum of them, and its loss.

    With a softcap s, logits z come as −2z / s, and r = (1 − tanh(z/s)) / 2 is left in `logits`. Then
    exp(s·tanh(z/s)) = exp(s) · exp2(−2s·log2(e)·r), and exp2 is by far the fastest exponential on a CPU.
    """
    log2_e = math.log2(math.e)
    if softcap:
        torch.sigmoid(logits, out=logits)
        torch.mul(logits, -2 * softcap * log2_e, out=exponents)
    else:
        exponents.mul_(log2_e)
    if not softcap or softcap > LARGEST_UNSHIFTED_SOFTCAP:
        exponents.sub_(exponents.amax(dim=1, keepdim=True))
    target_exponent_c1 = exponents.gather(1, target_c1)
    sums_c1 = exponents.exp2_().sum(dim=1, keepdim=True)
    return sums_c1, (sums_c1.log2() - target_exponent_c1) / log2_e


def _grad_logits(
    logits: Tensor, exponents: Tensor, sums_c1: Tensor, target_c1: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """The gradient with respect to the logits, as a matrix and a factor per row to scale it by.

    It is (softmax − one_hot(target)) · (1 − tanh²), where 1 − tanh² = 4 (r − r²).
    """
    exponents.scatter_add_(1, target_c1, -sums_c1)
    if not softcap:
        return exponents, 1 / sums_c1
    slope = logits.addcmul_(logits, logits, value=-1)
    return exponents.mul_(slope), 4 / sums_c1


def _matmul_into(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    if left.dtype == out.dtype:
        parts = token_parts(left)
        out_PtV, left_PtC = (x.unflatten(0, (parts, -1)) for x in (out, left))
        torch.baddbmm(out_PtV, left_PtC, right.expand(parts, -1, -1), beta=0, alpha=scale, out=out_PtV)
    else:
        out.copy_(left @ right)
        if scale != 1:
            # After the copy: before, it would be rounded to the narrow dtype once more.
            out.mul_(scale)


def _accumulate(out: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    if left.dtype == out.dtype:
        out.addmm_(left, right, beta=0 if is_first else 1)
    elif is_first:
        out.copy_(left @ right)
    else:
        out.add_(left @ right)


# One opaque node for torch.compile.
@torch.library.custom_op("hotlap::chunked_cross_entropy", mutates_args=())
def _loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float,
    factor: float,
    chunk_tokens: int,
    needs_grad: bool,
    passes: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if passes == "all":
        return kernel.loss_and_gradients(x, weight, targets, softcap, factor, needs_grad)
    return loss_and_gradients(x, weight, targets, softcap, factor, chunk_tokens, needs_grad, passes)


@_loss.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float,
    factor: float,
    chunk_tokens: int,
    needs_grad: bool,
    passes: str,
) -> tuple[Tensor, Tensor, Tensor]:
    del targets, softcap, factor, chunk_tokens, passes
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    if needs_grad:
        return loss, torch.empty_like(x), torch.empty_like(weight)
    return loss, x.new_empty(0), weight.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    del inputs
    _, grad_x, grad_weight = output
    ctx.save_for_backward(grad_x, grad_weight)
    ctx.mark_non_differentiable(grad_x, grad_weight)
    ctx.set_materialize_grads(False)


@first_derivative_only
def _scale_gradients(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_loss is None:
        return (None,) * 8
    grad_x, grad_weight = ctx.saved_tensors
    return grad_x * grad_loss, grad_weight * grad_loss, *[None] * 6


_loss.register_autograd(_scale_gradients, setup_context=_setup_context)
