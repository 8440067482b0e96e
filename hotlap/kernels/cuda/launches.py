"""Launches and bytes of operators on CUDA, counted without a GPU from the shapes of their tensors.

An operator is a launch that reads its inputs and writes its outputs; views and allocations are none. What
the compiler makes of operators is counted by `hotlap.emulation`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotlap.kernels.cuda.loss_rows import traffic_bytes

aten = torch.ops.aten
MATMULS = {aten.mm, aten.bmm, aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_}
ALLOCATIONS = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten.detach, aten.lift_fresh),
}
# Do not read `self`, which they overwrite or take the dtype of.
WRITES_ONLY = {aten.copy_, aten.fill_, aten.zero_, aten.new_zeros, aten.zeros_like}
BY_INDEX = {aten.gather, aten.scatter_add_}  # touch one element per index, not the whole tensor


class Launch(NamedTuple):
    operator: str
    is_matmul: bool
    bytes: int  # read and written


class Launches(TorchDispatchMode):
    """Keeps what is launched, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        launch = launch_of(func, args, kwargs or {}, result)
        if launch is not None:
            self.launches.append(launch)
        return result


def launch_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Launch | None:
    """What an operator launches; None for a view or an allocation."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    inputs = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    operator = func.overloadpacket
    if func is torch.ops.hotlap.loss_rows.default:
        operands = (given[name] for name in ("logits_cV", "targets_c", "losses_c", "needs_grad"))
        return Launch(str(func), False, traffic_bytes(*operands))
    if operator in ALLOCATIONS or func.namespace == "prim" or _is_view(func, inputs, outputs):
        return None
    return Launch(str(func), operator in MATMULS, _bytes(operator, given, outputs))


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
