"""The head's kernels, called with tensors. Shapes: T tokens, C width, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import needed_library
from hotlap.kernels.cpu.operands import dims, in_place, operand, pointer, structure

# Every chunk of a thread reads the whole weight, which must therefore come from a cache.
MOST_WEIGHTS = 2**22
# Of a thread's chunk, so that they stay in a cache from one pass to the next.
CHUNK_LOGITS = 2**20


def loss_and_gradients(
    x_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, softcap: float, factor: float, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """factor · Σ loss, and its gradients with respect to x and weight (empty unless needed)."""
    kernels, threads = needed_library(), torch.get_num_threads()
    (num_tokens, width), vocabulary = dims("x", x_TC, 2), dims("weight", weight_VC, 2)[0]
    x = operand("x", x_TC, (num_tokens, width))
    weight = operand("weight", weight_VC, (vocabulary, width))
    targets = _checked_targets(targets_T, num_tokens, vocabulary)
    chunk_tokens = max(1, min(CHUNK_LOGITS // vocabulary, -(-num_tokens // threads)))
    losses = x.new_empty(num_tokens)
    grad_x = torch.empty_like(x) if needs_grad else x.new_empty(0)
    grad_weight = torch.empty_like(weight) if needs_grad else x.new_empty(0)
    shares = x.new_empty(threads - 1 if needs_grad else 0, vocabulary, width)
    sizes = {"T": num_tokens, "C": width, "V": vocabulary, "chunk_tokens": chunk_tokens}
    tensors = {"x": x, "weight": weight, "targets": targets}
    head = structure("hotlap_head_t *", tensors, **sizes, softcap=softcap, factor=factor)
    workspace = x.new_empty(kernels.hotlap_head_floats(head, threads))
    results = (losses, grad_x, grad_weight, shares, workspace)
    kernels.hotlap_head(head, *map(pointer, results), threads)
    return losses.sum() * factor, grad_x, grad_weight


def rows(logits_TV: Tensor, targets_T: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """Losses (T,) of logits before the softcap.

    In place, each row of logits becomes the gradient of its loss up to a factor; these factors (T,)
    are returned too.
    """
    num_tokens, vocabulary = dims("logits", logits_TV, 2)
    logits = in_place("logits", logits_TV, (num_tokens, vocabulary))
    targets = _checked_targets(targets_T, num_tokens, vocabulary)
    losses, scales = logits.new_empty(num_tokens), logits.new_empty(num_tokens)
    needed_library().hotlap_head_rows(
        *(pointer(logits), pointer(targets), num_tokens, vocabulary, softcap),
        *(pointer(losses), pointer(scales), torch.get_num_threads()),
    )
    return losses, scales


def _checked_targets(targets_T: Tensor, num_tokens: int, vocabulary: int) -> Tensor:
    """int64. A target out of range would be a write to memory that is not the row's."""
    if targets_T.is_floating_point() or targets_T.is_complex():
        raise TypeError(f"targets: expected integers, found {targets_T.dtype}")
    targets = operand("targets", targets_T.long(), (num_tokens,), torch.int64)
    least, most = (int(end) for end in targets.aminmax())
    if least < 0 or most >= vocabulary:
        raise IndexError(f"targets {least} to {most} are out of bounds for a vocabulary of {vocabulary}")
    return targets
