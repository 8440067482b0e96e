"""What a step on fake tensors does: kernels and their sources, launches, operators, live memory.

Memory is counted as CUDA's caching allocator counts what is allocated: each storage rounded up to 512 bytes,
from its first use to its release. Reserved but unused memory and the CUDA context come on top.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotlap.emulation.torch_internals import body_of, replace_kernels

ALLOCATION_BYTES = 512
# Operators that only describe memory that is there, or reserve some.
_ALLOCATING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class CompilerRecorder:
    """Keeps what Inductor writes, and counts the launches of its kernels."""

    def __init__(self) -> None:
        self.graphs: list[str] = []  # wrapper code, in the order of compilation
        self.sources: dict[str, str] = {}  # {kernel: Triton source}
        self.launched: Counter[str] = Counter()

    def install(self) -> None:
        replace_kernels(self.make_kernel, self.graphs.append)

    def make_kernel(self, name: str, source: str) -> _Kernel:
        # Two graphs number their kernels independently, so that a name may come twice.
        while self.sources.get(name, source) != source:
            name += "_"
        self.sources[name] = source
        return _Kernel(name, self.launched)


class _Kernel:
    def __init__(self, name: str, launched: Counter[str]) -> None:
        self.name = name
        self.launched = launched

    def run(self, *_: Any, **__: Any) -> None:
        self.launched[self.name] += 1


class StepRecorder(TorchDispatchMode):
    """Sees every operator on the device: counts those that compute, and follows the live memory.

    The body of an operator of ours runs in place of its fake, so that its operators and buffers count.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[str] = Counter()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}  # {storage: bytes}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo traces through it, as it does through other modes of torch's own."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        body = body_of(operator)
        if body is not None and on_device((args, kwargs)):
            before = self.operators.total()
            with self:
                result = body(*args, **(kwargs or {}))
            if self.operators.total() == before:  # it launches a kernel itself
                self.operators[str(operator)] += 1
            return result
        result = operator(*args, **(kwargs or {}))
        if on_device((args, kwargs, result)) and computes(operator):
            self.operators[str(operator)] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self._follow(leaf)
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._sizes[key] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)

    def restart_peak(self) -> None:
        self.peak_bytes = self.live_bytes


def on_device(values: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.device.type == "cuda" for leaf in tree_leaves(values))


def computes(operator: Any) -> bool:
    """Whether the operator would launch something: it is neither a view nor an allocation."""
    if not isinstance(operator, torch._ops.OpOverload):
        return True  # a higher-order operator, such as flex_attention
    if operator.is_view or operator.namespace == "prim":
        return False
    return operator._schema.name.removeprefix("aten::") not in _ALLOCATING | {"detach", "lift_fresh"}
