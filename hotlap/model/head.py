"""The language-model head and its loss.

Shapes: T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hotlap.model.layers import Matrix
from hotlap.model.roles import Role


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap), in at least float32.

    Without a softcap, the logits unchanged.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class Head(Matrix):
    """The output layer: (T, C) → softcapped logits (T, V).

    Its weight has its own optimizer group.
    """

    roles: ClassVar[dict[str, Role]] = {"weight": "head"}

    def __init__(self, width: int, vocabulary: int, softcap: float | None) -> None:
        super().__init__(width, vocabulary, zero=True)
        self.softcap = softcap

    def forward(self, x_TC: Tensor) -> Tensor:
        return softcapped(super().forward(x_TC), self.softcap)


class Loss(Protocol):
    """Cross entropy in nats of the targets, with logits softcap · tanh(x·Wᵀ / softcap)."""

    def __call__(
        self,
        x_TC: Tensor,
        weight_VC: Tensor,
        targets_T: Tensor,
        softcap: float | None,
        *,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor: ...


def cross_entropy(
    x_TC: Tensor,
    weight_VC: Tensor,
    targets_T: Tensor,
    softcap: float | None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """The mean or the sum over the tokens, in float32 (float64 for float64 input)."""
    logits_TV = softcapped(F.linear(x_TC, weight_VC.to(x_TC.dtype)), softcap)
    return F.cross_entropy(logits_TV, targets_T, reduction=reduction)
