"""The language-model head, and the loss that it is trained with.

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
    """softcap · tanh(logits / softcap) in float32 or better; without a softcap, the logits."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class Head(Matrix):
    """The output layer: softcapped logits. Its weight has an optimizer group of its own."""

    roles: ClassVar[dict[str, Role]] = {"weight": "head"}

    def __init__(self, width: int, vocabulary: int, softcap: float | None) -> None:
        super().__init__(width, vocabulary, zero=True)
        self.softcap = softcap

    def forward(self, x_TC: Tensor) -> Tensor:
        return softcapped(super().forward(x_TC), self.softcap)


class Loss(Protocol):
    """Cross entropy in nats of the targets under softcap · tanh(x · weightᵀ / softcap)."""

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
    """The loss in float32 (float64 for float64), its mean or sum over the tokens."""
    logits_TV = softcapped(F.linear(x_TC, weight_VC.to(x_TC.dtype)), softcap)
    return F.cross_entropy(logits_TV, targets_T, reduction=reduction)
