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

from hotlap.emulation.kernel_traffic import moved_bytes
from hotlap.emulation.torch_internals import body_of, replace_kernels
from hotlap.kernels.cuda.launches import Launch, launch_of

ALLOCATION_BYTES = 512


class CompilerRecorder:
    """Keeps what Inductor writes, and counts the launches of its kernels and the bytes that they move."""

    def __init__(self) -> None:
        self.graphs: list[str] = []  # wrapper code, in the order of compilation
        self.sources: dict[str, str] = {}  # {kernel: Triton source}
        self.launched: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()  # bytes read and written, by kernel

    def install(self) -> None:
        replace_kernels(self.make_kernel, self.graphs.append)

    def make_kernel(self, name: str, source: str) -> _Kernel:
        # Two graphs number their kernels independently, so that a name may come twice.
        while self.sources.get(name, source) != source:
            name += "_"
        self.sources[name] = source
        return _Kernel(name, self)

    def restart(self) -> None:
        """Count launches from here."""
        self.launched.clear()
        self.moved.clear()


class _Kernel:
    def __init__(self, name: str, recorder: CompilerRecorder) -> None:
        self.name = name
        self.recorder = recorder

    def run(self, *arguments: Any, **_: Any) -> None:
        recorder = self.recorder
        recorder.launched[self.name] += 1
        recorder.moved[self.name] += moved_bytes(recorder.sources[self.name], arguments)


class StepRecorder(TorchDispatchMode):
    """Sees every operator on the device: keeps those that compute, and follows the live memory.

    The body of an operator of ours runs in place of its fake, so that its operators and buffers count.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
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
            before = len(self.launches)
            with self:
                result = body(*args, **(kwargs or {}))
            if len(self.launches) == before:  # it launches a kernel itself
                self._count(operator, args, kwargs or {}, result)
            return result
        result = operator(*args, **(kwargs or {}))
        if on_device((args, kwargs, result)):
            self._count(operator, args, kwargs or {}, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                self._follow(leaf)
        return result

    def _count(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if isinstance(operator, torch._ops.OpOverload):
            launch = launch_of(operator, args, kwargs, result)
        else:  # a higher-order operator, such as flex_attention, moves its tensors at least once
            tensors = (x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
            launch = Launch(str(operator), False, sum(x.nbytes for x in tensors))
        if launch is not None:
            self.launches.append(launch)

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
