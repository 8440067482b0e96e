"""Tensors on their way to C: every operand is checked here, and becomes a pointer of its own type.

C reads and writes by the sizes that it is told: with a tensor of another shape, dtype, layout or
device it would leave the tensor's memory. All checks raise, also under `python -O`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from _cffi_backend import cast  # what ffi.cast calls: in Python, that takes five times as long
from torch import Tensor

from hotlap.kernels.cpu.library import ffi

EPSILON = torch.finfo(torch.float32).eps  # the default of rms_norm

_FLOAT = ffi.typeof("float *")
_INTEGERS = {torch.int32: ffi.typeof("int32_t *"), torch.int64: ffi.typeof("int64_t *")}


def check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    """Raise unless x is a CPU tensor of that dtype and shape, in which no size is 0."""
    if x.dtype is not dtype:
        raise TypeError(f"{name}: expected {dtype}, found {x.dtype}")
    if not x.is_cpu:
        raise ValueError(f"{name}: expected a tensor on the CPU, found one on {x.device}")
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, found {tuple(x.shape)}")
    if 0 in shape:
        raise ValueError(f"{name}: expected every size to be at least 1, found shape {tuple(shape)}")


def operand(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """x, checked, contiguous and not a negated view: a copy if it was not."""
    check(name, x, shape, dtype)
    return x.resolve_neg().contiguous()


def optional(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """As `operand`. An empty tensor, whose pointer is NULL, stands for none."""
    return operand(name, x, shape) if x.numel() else x


def in_place(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x itself, checked, for C to write to: it has to be contiguous already."""
    check(name, x, shape)
    if x.is_neg():
        raise ValueError(f"{name}: expected a tensor of its own, found a negated view")
    if not x.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, found strides {x.stride()} for {shape}")
    return x


def dims(name: str, x: Tensor, count: int) -> torch.Size:
    """The shape of x, if it has so many dimensions."""
    if x.ndim != count:
        raise ValueError(f"{name}: expected {count} dimensions, found shape {tuple(x.shape)}")
    return x.shape


def pointer(x: Tensor) -> Any:
    """The address of a contiguous CPU tensor, typed by its dtype; NULL for an empty tensor.

    Does not keep the tensor alive: the caller holds it in a variable until C returns.
    """
    kind = _FLOAT if x.dtype is torch.float32 else _INTEGERS.get(x.dtype)
    if kind is None:
        raise TypeError(f"expected a tensor of float32, int32 or int64, found {x.dtype}")
    if not (x.is_contiguous() and x.is_cpu):
        raise ValueError(f"expected a contiguous CPU tensor, found strides {x.stride()} on {x.device}")
    if x.is_neg():  # its numbers in memory have the other sign
        raise ValueError("expected a tensor of its own, found a negated view")
    return cast(kind, x.data_ptr())


def structure(kind: str, tensors: Mapping[str, Tensor], **others: Any) -> Any:
    """A pointer to a new struct of kernels.h, by field names. It keeps no tensor alive either."""
    fields: dict[str, Any] = {name: pointer(x) for name, x in tensors.items()}
    fields.update(others)
    return ffi.new(kind, fields)
