"""What is replaced in torch and Triton so that a program takes the emulated device for a GPU.

Tried with torch 2.13.0 (CPU build) and triton 3.7.1; another release may need changes here and nowhere else.
What the compiler alone needs is replaced by `hotlap/emulation/torch_internals.py`, and the C++ side is
`host_device.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._inductor.runtime.hints import HeuristicType

from hotlap.emulation.torch_internals import pretend, replace_kernels
from hotlap.gpus import find_gpu
from tests.cuda.host_device import HostDevice

BFLOAT16_NAN = 0x7FC0
INTERPRETED_ELEMENTS = 2**16  # of a program; a power of two


def replace_device(device: HostDevice, gpu: str) -> None:
    """`torch.cuda` as one device without a driver, for which Inductor writes its kernels.

    Random numbers are the CPU's, so that runs can be compared.
    """
    pretend(find_gpu(gpu))
    answers = {
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "synchronize": lambda _=None: device.synchronize(),
        "set_sync_debug_mode": lambda mode: device.forbid_waits(mode == "error"),
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "max_memory_allocated": lambda _=None: device.peak_bytes,
        "max_memory_reserved": lambda _=None: device.peak_bytes,
    }
    for name, replacement in answers.items():
        replace(torch.cuda, name, replacement)
    # Their kernels are CUDA's own: scaled_dot_product_attention falls back to plain operators.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def interpret_kernels() -> None:
    """Run Triton kernels in Triton's interpreter, in the memory of the emulated device.

    TRITON_INTERPRET=1 must have been set before Triton was imported. torch then launches the kernels that
    Inductor writes with their first configuration, through the interpreter.
    """
    import torch._inductor.runtime.triton_helpers as triton_helpers
    from torch._inductor.codecache import PyCodeCache
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps

    replace_kernels(lambda name, source: widened(getattr(PyCodeCache.load(source), name)), lambda _: None)
    replace(triton_helpers, "libdevice", InterpretedLibdevice)
    replace(InterpreterBuilder, "create_dot", dot_of_values)
    replace(ReduceOps, "generic_reduce", reduce_by_pairs)
    replace(interpreter, "_convert_float", rounded_to_bfloat16(interpreter._convert_float))
    # The interpreter would copy every argument to the CPU and back.
    replace(GridExecutor, "_init_args_hst", arguments_on_host)
    replace(GridExecutor, "_restore_args_dev", lambda *_: None)


def widened(kernel: Any) -> Any:
    """A kernel of Inductor whose programs do as many elements as INTERPRETED_ELEMENTS allows.

    The interpreter takes time per program rather than per element. What a pointwise kernel or a reduction by
    row computes does not depend on how many elements or rows a program has.
    """
    blocks, hints = kernel.configs[0].kwargs, kernel.size_hints or {}
    is_split = kernel.is_mix_order_reduction or kernel.heuristic_type is HeuristicType.SPLIT_SCAN
    if "XBLOCK" not in blocks or "x" not in hints or is_split:
        return kernel
    others = math.prod(
        blocks.get(f"{dimension.upper()}BLOCK", power_of_two_from(hint))
        for dimension, hint in hints.items()
        if dimension != "x"
    )
    widest = max(blocks["XBLOCK"], INTERPRETED_ELEMENTS // others)
    blocks["XBLOCK"] = min(widest, power_of_two_from(hints["x"]))
    return kernel


def power_of_two_from(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def by_numpy(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of single values, in the form that an interpreted kernel calls."""

    def apply(x: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        return tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype.scalar), x.type)

    return apply


class InterpretedLibdevice:
    """The functions of CUDA's libdevice, which is machine code, that Inductor uses in our models."""

    exp = staticmethod(by_numpy(np.exp))
    rsqrt = staticmethod(by_numpy(lambda x: 1 / np.sqrt(x)))
    tanh = staticmethod(by_numpy(np.tanh))


def dot_of_values(
    builder: Any, a: Any, b: Any, accumulator: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """`tl.dot`. The interpreter of triton 3.7.1 keeps bfloat16 as uint16 and multiplies these integers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def values(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x.data
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    product = np.matmul(values(a), values(b), dtype=accumulator.data.dtype)
    return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def rounded_to_bfloat16(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of floats, which would cut off where a GPU rounds to nearest even."""

    def converted(x: Any, dtype: Any, to: Any, rounding_mode: Any) -> Any:
        import triton.language as tl

        if (dtype, to) == (tl.bfloat16, tl.float32):
            return x.astype(np.uint32) << 16
        if (dtype, to) != (tl.float32, tl.bfloat16):
            return convert(x, dtype, to, rounding_mode)
        return np.where(np.isnan(x), BFLOAT16_NAN, bfloat16_bits(x)).astype(np.uint16)

    return converted


def bfloat16_bits(x: Any) -> Any:
    """Of finite values and infinities: the upper half of the bits, rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def reduce_by_pairs(operation: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """`tl.reduce` by a function of the kernel's, for all pairs of neighbors at once until one is left.

    The interpreter would call the function for every element, which takes a millisecond: it knows sums, and
    the largest and smallest of `tl.max` and `tl.min`, but not those of Inductor, which keep NaN.
    """
    blocks, axis = operation.unravel(blocks, operation.axis)
    dtypes = [block.dtype for block in blocks]
    arrays = [np.moveaxis(block.handle.data, axis, -1) for block in blocks]
    while arrays[0].shape[-1] > 1:
        pairs = [array[..., side::2] for side in (0, 1) for array in arrays]
        combined = operation.combine_fn.fn(*map(operation.to_tensor, pairs, 2 * dtypes))
        combined = combined if isinstance(combined, tuple) else (combined,)
        arrays = [block.handle.data for block in combined]
    reduced = [np.moveaxis(array, -1, axis) if operation.keep_dims else array[..., 0] for array in arrays]
    return [operation.to_tensor(array, dtype) for array, dtype in zip(reduced, dtypes, strict=True)]


def arguments_on_host(executor: Any, args: Any, kwargs: Any) -> Any:
    """The same memory as CPU tensors."""

    def on_host(x: Any) -> Any:
        is_on_device = isinstance(x, torch.Tensor) and x.is_cuda
        return torch.ops.host_device.on_host(x) if is_on_device else x

    return [on_host(x) for x in args], {name: on_host(x) for name, x in kwargs.items()}


def replace(owner: Any, name: str, replacement: Any) -> None:
    assert hasattr(owner, name), f"{owner.__name__} of torch {torch.__version__} has no {name}"
    setattr(owner, name, replacement)
