"""Self-attention with normalized queries and keys, rotary positions and mixed-in values.

Shapes: T tokens, C width, H query heads, G key/value heads, D head dim. Which token sees which is decided by
the attention plan that the layer is given.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from hotlap.config import ModelConfig
from hotlap.model.layers import Matrix, norm
from hotlap.model.roles import Role
from hotlap.model.rotary import Rotation, rotate


class AttentionPlan(Protocol):
    """What the tokens of a batch see of those before them: a backend's plan, or a layer's cache."""

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        """Masked attention, (T, H, D)."""
        ...

    def previous(self, tokens_T: Tensor) -> Tensor:
        """The token before each of these in its document, −1 before the first; (T,)."""
        ...


class Attention(nn.Module):
    roles: ClassVar[dict[str, Role]] = {"value_mix": "scalar"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.kv_heads = config.head_dim, config.num_heads, config.kv_heads
        self.q = Matrix(config.width, config.width)
        self.k, self.v = (Matrix(config.width, self.kv_heads * self.head_dim) for _ in range(2))
        self.out = Matrix(config.width, config.width, zero=True)
        if config.values == "plain":
            self.value_mix = None
        else:
            shape = () if config.value_mix == "one" else (2,)
            self.value_mix = nn.Parameter(torch.full(shape, 0.5))

    def forward(
        self, x_TC: Tensor, value_embedding_TGD: Tensor | None, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        q, k, v = (self.heads(project(x_TC)) for project in (self.q, self.k, self.v))
        q, k = rotate(norm(q), rotation), rotate(norm(k), rotation)
        v = self.mix_values(v, value_embedding_TGD)
        y_THD = plan.attend(q, k, v, self.head_dim**-0.5)
        return self.out(y_THD.flatten(-2))

    def heads(self, features_TF: Tensor) -> Tensor:
        return features_TF.unflatten(-1, (-1, self.head_dim))

    def mix_values(self, v_TGD: Tensor, value_embedding_TGD: Tensor | None) -> Tensor:
        """λ₀·v + λ₁·value_embedding; with one λ: (1 − λ)·v + λ·value_embedding, of v itself if it is None."""
        if self.value_mix is None:
            return v_TGD
        if value_embedding_TGD is not None:
            value_embedding_TGD = value_embedding_TGD.to(v_TGD.dtype)
        if self.value_mix.ndim == 0:
            other = v_TGD if value_embedding_TGD is None else value_embedding_TGD
            return (1 - self.value_mix) * v_TGD + self.value_mix * other
        v_TGD = self.value_mix[0] * v_TGD
        if value_embedding_TGD is None:
            return v_TGD
        return v_TGD + self.value_mix[1] * value_embedding_TGD
