"""Attention over packed documents: one mask, four backends that must agree.

`dense` is the oracle, `flex` the fast path on CUDA, `native` the one on a CPU with gcc, `blocked`
the one that trains everywhere. A backend that cannot work on the device is an error here, never a quiet
switch to another.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hotlap import kernels
from hotlap.attention.blocked import DEFAULT_SAVED_BYTES, BlockedBackend
from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import Mask, previous_tokens
from hotlap.attention.native import NativeBackend
from hotlap.errors import ConfigError, DeviceError

BACKENDS = ("auto", "dense", "flex", "native", "blocked")


class Backend(Protocol):
    """Plan a mask once a batch, then attend with that plan in every layer."""

    @property
    def name(self) -> str: ...

    def plan(self, mask: Mask) -> Any: ...

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: Any, scale: float) -> Tensor:
        """(T, H, D) queries, (T, G, D) keys and values of one packed sequence → (T, H, D)."""
        ...


@dataclass(frozen=True)
class Plan:
    """A backend's plan for one batch, ready to attend with."""

    backend: Backend
    layout: Any
    mask: Mask

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        return self.backend.attend(q_THD, k_TGD, v_TGD, self.layout, scale)

    def previous(self, tokens_T: Tensor) -> Tensor:
        return previous_tokens(tokens_T, self.mask.documents)


def make_plan(backend: Backend, mask: Mask) -> Plan:
    return Plan(backend, backend.plan(mask), mask)


def choose_backend(
    name: str, device: torch.device | str, *, saved_bytes: int = DEFAULT_SAVED_BYTES
) -> Backend:
    """The backend to train with on `device`; `auto` is flex on CUDA, native on a CPU that can compile it, and
    blocked elsewhere.

    `saved_bytes` bounds what one layer of `blocked` keeps for its backward.
    """
    kind = torch.device(device).type
    if name == "auto":
        name = "flex" if kind == "cuda" else "native" if kind == "cpu" and kernels.library() else "blocked"
    if name == "dense":
        return DenseBackend()
    if name == "blocked":
        return BlockedBackend(saved_bytes)
    if name == "native":
        reason = kernels.unavailable() if kind == "cpu" else f"device {kind}"
        if reason:
            raise DeviceError(
                expected="a CPU and gcc for the native attention backend",
                found=reason,
                do="choose blocked or auto there",
            )
        return NativeBackend()
    if name != "flex":
        raise ConfigError(
            expected=f"an attention backend out of {', '.join(BACKENDS)}",
            found=repr(name),
            do="name one of them, or leave it at auto",
        )
    if kind != "cuda":
        raise DeviceError(
            expected="a CUDA device for the flex attention backend",
            found=f"device {kind}, where flex_attention has no backward",
            do="choose blocked or auto there",
        )
    from hotlap.attention.flex import FlexBackend

    return FlexBackend()
