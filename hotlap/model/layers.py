"""Layers that both models use: a linear map without bias, an embedding table, a norm."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.model.roles import Role


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class Matrix(nn.Module):
    """A linear map without bias. Casts its float32 weight (out, in) to the dtype of the input."""

    roles: ClassVar[dict[str, Role]] = {"weight": "matrix"}

    def __init__(self, in_features: int, out_features: int, *, zero: bool = False) -> None:
        super().__init__()
        bound = 0.0 if zero else in_features**-0.5
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Table(nn.Embedding):
    """An embedding table, initialized from a standard normal distribution."""

    roles: ClassVar[dict[str, Role]] = {"weight": "embedding"}
