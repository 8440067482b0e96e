"""The head's kernel, called with tensors. Shapes: T tokens, C width, V vocabulary."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import kernels_take, needed_library, pointer
from hotlap.kernels.cpu.shares import pays_to_share

# Every chunk of a thread goes through the whole weight, which must therefore come from a cache.
MOST_WEIGHTS = 2**22
# What the passes over logits start from is −2 · log2(e) · logits / softcap.
LOGIT_SCALE = -2 * math.log2(math.e)
# Of a thread's chunk, so that they stay in a cache between the passes.
CHUNK_LOGITS = 2**20


def suits(x_TC: Tensor, weight_VC: Tensor) -> bool:
    """Whether the kernel takes such operands and is the faster way."""
    fits = len(x_TC) > 0 and weight_VC.numel() <= MOST_WEIGHTS
    return fits and pays_to_share(x_TC, weight_VC) and kernels_take(x_TC, weight_VC)


def loss_and_gradients(
    x_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, softcap: float, factor: float, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """factor · Σ loss, and its gradients for x and weight (empty unless needed)."""
    kernels, threads = needed_library(), torch.get_num_threads()
    (num_tokens, width), vocabulary = x_TC.shape, len(weight_VC)
    assert num_tokens > 0, "without tokens there is no gradient to write, which is how C is told of none"
    assert weight_VC.shape == (vocabulary, width), f"a weight of {weight_VC.shape}, x of width {width}"
    assert targets_T.shape == (num_tokens,), f"{len(targets_T)} targets for {num_tokens} tokens"
    _check_range(targets_T, vocabulary)
    chunk_tokens = max(1, min(CHUNK_LOGITS // vocabulary, -(-num_tokens // threads)))
    x, weight, targets = x_TC.contiguous(), weight_VC.contiguous(), targets_T.long().contiguous()
    losses = x.new_empty(num_tokens)
    grad_x = x.new_empty(x.shape if needs_grad else 0)
    grad_weight = x.new_empty(weight.shape if needs_grad else 0)
    grad_weights = x.new_empty(threads - 1 if needs_grad else 0, vocabulary, width)
    workspace = x.new_empty(kernels.head_floats(chunk_tokens, width, vocabulary, threads))
    kernels.head(
        *(pointer(operand) for operand in (x, weight, targets)),
        *(num_tokens, width, vocabulary),
        *(ctypes.c_float(softcap), ctypes.c_float(factor), chunk_tokens),
        *(pointer(result) for result in (losses, grad_x, grad_weight, grad_weights, workspace)),
        threads,
    )
    return losses.sum() * factor, grad_x, grad_weight


def rows(logits_TV: Tensor, targets_T: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """Turn logits, times LOGIT_SCALE / softcap, into the gradient of their losses up to a factor a row.

    Returns the losses and the factors, each (T,).
    """
    assert logits_TV.is_contiguous(), "rows of logits lie together"
    (num_tokens, vocabulary), targets = logits_TV.shape, targets_T.long().contiguous()
    assert targets.shape == (num_tokens,), f"{len(targets)} targets for {num_tokens} tokens"
    _check_range(targets, vocabulary)
    losses, scales = logits_TV.new_empty(2, num_tokens)
    needed_library().head_rows(
        *(pointer(logits_TV), pointer(targets), num_tokens, vocabulary, ctypes.c_float(softcap)),
        *(pointer(losses), pointer(scales), torch.get_num_threads()),
    )
    return losses, scales


def _check_range(targets_T: Tensor, vocabulary: int) -> None:
    """Always on, as PyTorch's own check is: such a target would be a write to memory that is not ours."""
    least, most = (int(end) for end in targets_T.aminmax())
    if least < 0 or most >= vocabulary:
        raise IndexError(f"targets {least} to {most} are out of bounds for a vocabulary of {vocabulary}")
