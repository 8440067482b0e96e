"""Attention over packed documents: one mask, three backends that must agree.

`dense` is the oracle, `flex` the fast path on CUDA, `blocked` the one that trains everywhere else. A backend
that cannot work on the device is an error here, never a quiet switch to another.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hotlap.attention.blocked import DEFAULT_SAVED_BYTES, BlockedBackend
from hotlap.attention.dense import DenseBackend
from hotlap.attention.masks import Mask, previous_tokens
from hotlap.errors import ConfigError, DeviceError

BACKENDS = ("auto", "dense", "flex", "blocked")


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
    """The backend to train with on `device`; `auto` is flex on CUDA and blocked elsewhere.

    `saved_bytes` bounds what one layer of `blocked` keeps for its backward.
    """
    on_cuda = torch.device(device).type == "cuda"
    if name == "auto":
        name = "flex" if on_cuda else "blocked"
    if name == "dense":
        return DenseBackend()
    if name == "blocked":
        return BlockedBackend(saved_bytes)
    if name != "flex":
        raise ConfigError(
            expected=f"an attention backend out of {', '.join(BACKENDS)}",
            found=repr(name),
            do="name one of them, or leave it at auto",
        )
    if not on_cuda:
        raise DeviceError(
            expected="a CUDA device for the flex attention backend",
            found=f"device {torch.device(device).type}, where flex_attention has no backward",
            do="choose blocked or auto there",
        )
    from hotlap.attention.flex import FlexBackend

    return FlexBackend()
