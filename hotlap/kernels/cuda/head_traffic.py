"""Launches and bytes of the chunked loss on CUDA, counted without a GPU.

The real chunk loop runs on meta tensors. Each operator that it calls is a launch that reads its inputs and
writes its outputs; views and allocations are none. `python -m bench.head_traffic` prints the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotlap.kernels.chunked_loss import Passes, loss_and_gradients
from hotlap.kernels.cuda.loss_rows import traffic_bytes

aten = torch.ops.aten
MATMULS = {aten.mm, aten.bmm, aten.addmm, aten.addmm_, aten.baddbmm}
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
# Do not read `self`, which they overwrite or take the dtype of.
WRITES_ONLY = {aten.copy_, aten.fill_, aten.zero_, aten.new_zeros, aten.zeros_like}
BY_INDEX = {aten.gather, aten.scatter_add_}  # touch one element per index, not the whole tensor


class Launch(NamedTuple):
    operator: str
    is_matmul: bool
    bytes: int  # read and written


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
    with _Launches() as recorded:
        loss, *gradients = loss_and_gradients(
            x, weight, targets, softcap or 0.0, 1 / tokens, chunk_tokens, needs_grad=True, passes=passes
        )
        for gradient in gradients:  # as the backward pass scales them
            gradient * torch.empty_like(loss)
    matmuls = [launch for launch in recorded.launches if launch.is_matmul]
    matmul_bytes = sum(launch.bytes for launch in matmuls)
    total_bytes = sum(launch.bytes for launch in recorded.launches)
    return Traffic(len(recorded.launches), len(matmuls), total_bytes - matmul_bytes, matmul_bytes)


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        given |= kwargs or {}
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        operator = func.overloadpacket
        if func is torch.ops.hotlap.loss_rows.default:
            operands = (given[name] for name in ("logits_cV", "targets_c", "losses_c", "needs_grad"))
            self.launches.append(Launch(str(func), False, traffic_bytes(*operands)))
        elif operator not in ALLOCATIONS and not _is_view(func, inputs, outputs):
            self.launches.append(Launch(str(func), operator in MATMULS, _bytes(operator, given, outputs)))
        return result


def _is_view(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    storages = {x.untyped_storage()._cdata for x in inputs}
    return not func._schema.is_mutable and all(x.untyped_storage()._cdata in storages for x in outputs)


def _bytes(operator: Any, given: dict[str, Any], outputs: list[Tensor]) -> int:
    """Read and written by an operator of PyTorch, given its arguments by name."""
    if operator in BY_INDEX:
        # An index and an element are read and an element is written; to add, one more is read.
        touched = [given["index"], *(3 if operator is aten.scatter_add_ else 2) * [given["self"]]]
        return given["index"].numel() * sum(x.element_size() for x in touched)
    unread = {"out"}
    if operator in WRITES_ONLY or given.get("beta") == 0:
        unread.add("self")
    read = tree_leaves([x for name, x in given.items() if name not in unread])
    read_once = {id(x): x for x in read if isinstance(x, Tensor)}.values()  # given twice, read once
    return sum(x.nbytes for x in (*read_once, *outputs))
