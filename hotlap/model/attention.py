"""Self-attention with QK norm, rotary position embeddings and value embeddings.

The attention plan decides which keys a query sees.

Shapes: T tokens, C width, H query heads, G key/value heads, D head dim.
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
    """How queries attend to keys: a backend and the mask of a batch, or the KV cache of a layer."""

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        """Masked attention: (T, H, D) queries, (T, G, D) keys and values → (T, H, D)."""
        ...

    def previous(self, tokens_T: Tensor) -> Tensor:
        """(T,): the token before each one in its document, −1 at the start of a document."""
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
        """(T, heads · D) → (T, heads, D)"""
        return features_TF.unflatten(-1, (-1, self.head_dim))

    def mix_values(self, v_TGD: Tensor, value_embedding_TGD: Tensor | None) -> Tensor:
        """λ₀·v + λ₁·value_embedding, or with a single λ: (1 − λ)·v + λ·value_embedding.

        Without a value embedding, the single λ mixes v with itself, and λ₁ is unused.
        """
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
