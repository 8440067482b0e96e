"""The passes over a chunk's logits as one operator: softcap, cross entropy and gradient, in place.

The operator can be called on meta tensors too, to count launches and bytes where there is neither a GPU nor
Triton. Shapes: c tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("hotlap::loss_rows", mutates_args=("logits_cV", "losses_c"))
def loss_rows(
    logits_cV: Tensor,
    targets_c: Tensor,
    losses_c: Tensor,
    softcap: float,
    factor: float,
    needs_maximum: bool,
    needs_grad: bool,
) -> None:
    """Write factor · loss of each row to `losses_c`, and its gradient over the logits if it is needed.

    The logits come before the softcap, 0 for none. `needs_maximum`: exponentials would leave float32's range
    unless the row's maximum is subtracted. A target outside the vocabulary makes the row's loss NaN.
    """
    _check(logits_cV, targets_c, losses_c)
    from hotlap.kernels.cuda import loss_rows_kernel

    loss_rows_kernel.launch(logits_cV, targets_c, losses_c, softcap, factor, needs_maximum, needs_grad)


@loss_rows.register_fake
def _(
    logits_cV: Tensor,
    targets_c: Tensor,
    losses_c: Tensor,
    softcap: float,
    factor: float,
    needs_maximum: bool,
    needs_grad: bool,
) -> None:
    del softcap, factor, needs_maximum, needs_grad
    _check(logits_cV, targets_c, losses_c)


def traffic_bytes(logits_cV: Tensor, targets_c: Tensor, losses_c: Tensor, needs_grad: bool) -> int:
    """What a launch reads and writes: every logit twice and its gradient once, or every logit once."""
    passes = 3 if needs_grad else 1
    return passes * logits_cV.nbytes + targets_c.nbytes + losses_c.nbytes


def _check(logits_cV: Tensor, targets_c: Tensor, losses_c: Tensor) -> None:
    """The kernel addresses memory by these shapes, dtypes and strides alone."""
    rows = (len(logits_cV),)
    if logits_cV.ndim != 2 or not logits_cV.is_contiguous():
        raise ValueError(f"logits: expected contiguous rows, found {tuple(logits_cV.shape)}")
    if logits_cV.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"logits: expected bfloat16, float16 or float32, found {logits_cV.dtype}")
    for name, tensor, dtype in (("targets", targets_c, torch.int64), ("losses", losses_c, torch.float32)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, found {tensor.dtype}")
        if tensor.shape != rows or not tensor.is_contiguous():
            raise ValueError(f"{name}: expected {rows}, contiguous, found {tuple(tensor.shape)}")
        if tensor.device != logits_cV.device:
            raise ValueError(f"{name}: expected {logits_cV.device}, found {tensor.device}")
