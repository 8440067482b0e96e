"""A transformer block: mix the embedding into the residual stream, then attention, then MLP.

Shapes: T tokens of one packed sequence, C width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hotlap.config import ModelConfig
from hotlap.model.attention import Attention, AttentionPlan
from hotlap.model.layers import norm
from hotlap.model.mlp import MLP
from hotlap.model.roles import Role
from hotlap.model.rotary import Rotation


class SkipConnection(NamedTuple):
    """The output of an encoder block and its weight in the input of a decoder block."""

    x: Tensor  # (T, C)
    weight: Tensor  # ()


class Block(nn.Module):
    roles: ClassVar[dict[str, Role]] = {"residual_mix": "scalar"}

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        attention: Callable[[ModelConfig], Any] = Attention,
        mlp: Callable[[ModelConfig], Any] = MLP,
    ) -> None:
        super().__init__()
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attention: Attention | None = (
            None if layer in config.attention_free_layers else attention(config)
        )
        self.mlp: MLP = mlp(config)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        skip: SkipConnection | None,
        value_embedding: Tensor | None,
        rotation: Rotation,
        plan: AttentionPlan,
    ) -> Tensor:
        x = self.mix(x, x0, skip)
        if self.attention is not None:
            x = x + self.attention(norm(x), value_embedding, rotation, plan)
        return x + self.mlp(norm(x))

    def mix(self, x: Tensor, x0: Tensor, skip: SkipConnection | None) -> Tensor:
        """λ₀ · (x + skip) + λ₁ · x0, where x0 (T, C) is the normalized embedding."""
        if skip is not None:
            x = x + skip.weight * skip.x
        return self.residual_mix[0] * x + self.residual_mix[1] * x0
