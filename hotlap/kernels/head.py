"""The head's kernel, called with tensors. Shapes: T tokens, C width, V vocabulary."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hotlap.kernels.compiled import kernels_take, needed_library, pointer

# Every chunk of a thread goes through the whole weight, which must therefore come from a cache.
MOST_WEIGHTS = 2**22
# Of a thread's chunk, so that they stay in its core's cache between the passes.
CHUNK_LOGITS = 2**19


def suits(x_TC: Tensor, weight_VC: Tensor) -> bool:
    """Whether the kernel takes such operands and is the faster way."""
    return weight_VC.numel() <= MOST_WEIGHTS and kernels_take(x_TC, weight_VC)


def loss_and_gradients(
    x_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, softcap: float, factor: float, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """factor · Σ loss, and its gradients for x and weight (empty unless needed)."""
    kernels, threads = needed_library(), torch.get_num_threads()
    (num_tokens, width), vocabulary = x_TC.shape, len(weight_VC)
    chunk_tokens = max(1, min(CHUNK_LOGITS // vocabulary, -(-num_tokens // threads)))
    x, weight, targets = x_TC.contiguous(), weight_VC.contiguous(), targets_T.long().contiguous()
    losses = x.new_empty(num_tokens)
    grad_x = x.new_empty(x.shape if needs_grad else 0)
    grad_weight = x.new_empty(weight.shape if needs_grad else 0)
    grad_weights = x.new_empty(threads - 1 if needs_grad else 0, vocabulary, width)
    workspace = x.new_empty(threads, kernels.head_floats(chunk_tokens, width, vocabulary))
    kernels.head(
        *(pointer(operand) for operand in (x, weight, targets)),
        *(num_tokens, width, vocabulary),
        *(ctypes.c_float(softcap), ctypes.c_float(factor), chunk_tokens),
        *(pointer(result) for result in (losses, grad_x, grad_weight, grad_weights, workspace)),
        threads,
    )
    return losses.sum() * factor, grad_x, grad_weight
