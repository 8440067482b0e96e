"""Dtypes and devices of every operator of a step on fake tensors, and what is wrong with them.

Fake tensors accept what a GPU would refuse, such as a matmul of bfloat16 with float32, and what would make
it wait. So every operator is looked at.
"""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hotlap
from hotlap.emulation.recorder import on_device
from hotlap.emulation.torch_internals import body_of

PACKAGE = str(Path(hotlap.__file__).parent)
MATMULS = {
    "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_", "aten::linear",
    "aten::matmul", "flex_attention", "flex_attention_backward",
}  # fmt: skip
# The host waits for the device in these, or the size of their result depends on values.
WAITING = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::repeat_interleave",
}  # fmt: skip


class Census(TorchDispatchMode):
    """`findings` has one line per kind of mistake, with the line of ours that made it."""

    supports_higher_order_operators = True

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.findings: dict[str, None] = {}
        self.matmuls: Counter[str] = Counter()  # by operator and dtypes
        self.wide: Counter[str] = Counter()  # places that make float32 tensors with a row per token
        self.operators = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operators += 1
        result = operator(*args, **kwargs)
        body = body_of(operator)
        if body is not None and on_device(args):
            with self:
                self.compare(operator, body(*args, **kwargs), result)
        self.look_at(name_of(operator), (args, kwargs), result)
        return result

    def look_at(self, name: str, inputs: Any, result: Any) -> None:
        before = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        after = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name in WAITING:
            self.find(f"{name} waits for the device")
        for tensor in (*before, *after):
            # A number on the host goes to a kernel by value.
            if tensor.device.type != "cuda" and tensor.ndim:
                self.find(f"{name} has a tensor on {tensor.device}")
            if tensor.dtype == torch.float64:
                self.find(f"{name} has a float64 tensor")
        if name in MATMULS or "scaled_dot_product" in name:
            # flex_attention also takes block lists; its operands are the first three.
            operands = [x for x in before if x.is_floating_point()]
            operands = operands[:3] if "attention" in name or "dot_product" in name else operands
            dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in operands)
            self.matmuls[f"{name} of {', '.join(dtypes)}"] += 1
            if set(dtypes) != {"bfloat16"}:
                self.find(f"{name} of {', '.join(dtypes)}")
        for tensor in after:
            if tensor.dtype == torch.float32 and tensor.ndim > 1 and tensor.shape[0] == self.num_tokens:
                self.wide[place()] += 1

    def compare(self, operator: Any, found: Any, promised: Any) -> None:
        """What the body of an operator returns against what its fake says."""
        tensors = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (found, promised))
        for real, fake in zip(*tensors, strict=True):
            for attribute in ("shape", "dtype", "device"):
                if getattr(real, attribute) != getattr(fake, attribute):
                    self.find(f"{name_of(operator)} returns another {attribute} than its fake")

    def find(self, mistake: str) -> None:
        self.findings[f"{mistake} at {place()}"] = None


def name_of(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return str(schema.name if schema else operator)


def place() -> str:
    """The innermost line of the package that is being run; autograd's own calls have none."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) and not path.startswith(f"{PACKAGE}/emulation"):
            function = frame.f_code.co_qualname.partition(".<locals>")[0]  # not a comprehension within it
            return f"{path.removeprefix(PACKAGE + '/')}:{function}"
        frame = frame.f_back
    return "autograd"
