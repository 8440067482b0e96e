"""Launches and bytes of the chunked loss on CUDA: the real chunk loop, run on meta tensors.

`hotlap.emulation.head` counts those of full logits. `python -m bench.head_traffic` prints the table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hotlap.kernels.chunked_loss import Passes, loss_and_gradients
from hotlap.kernels.cuda.launches import Launches


class Traffic(NamedTuple):
    """Of a forward and backward pass of the head."""

    launches: int
    matmuls: int  # of these launches
    bytes_outside_matmuls: int
    bytes_of_matmuls: int


def head_traffic(
    tokens: int,
    width: int,
    vocabulary: int,
    *,
    softcap: float | None,
    chunk_tokens: int,
    passes: Passes,
    dtype: torch.dtype = torch.bfloat16,
) -> Traffic:
    """Of loss and gradients with activations in `dtype` and a float32 weight."""
    x = torch.empty(tokens, width, dtype=dtype, device="meta")
    weight = torch.empty(vocabulary, width, device="meta")
    targets = torch.empty(tokens, dtype=torch.int64, device="meta")
    with Launches() as recorded:
        loss, *gradients = loss_and_gradients(
            x, weight, targets, softcap or 0.0, 1 / tokens, chunk_tokens, needs_grad=True, passes=passes
        )
        for gradient in gradients:  # as the backward pass scales them
            gradient * torch.empty_like(loss)
    matmuls = [launch for launch in recorded.launches if launch.is_matmul]
    matmul_bytes = sum(launch.bytes for launch in matmuls)
    total_bytes = sum(launch.bytes for launch in recorded.launches)
    return Traffic(len(recorded.launches), len(matmuls), total_bytes - matmul_bytes, matmul_bytes)
