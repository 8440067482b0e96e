"""A transformer block: residual mixing, masked attention with mixed-in values, ReLU² MLP.

Shapes: T tokens, C width, H query heads, G key/value heads, D head dim. The block works on one packed
sequence; which token sees which is the business of the attention plan that it is given.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from hotlap.config import ModelConfig
from hotlap.model.layers import Matrix, mix, rms_norm
from hotlap.model.mlp import MLP
from hotlap.model.products import linears
from hotlap.model.roles import Role
from hotlap.model.rotary import Rotation, norm_and_rotate


class AttentionPlan(Protocol):
    """What the tokens at hand see of those before them: a backend's plan for a batch, or a layer's cache."""

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
        self, x_TC: Tensor, mixed_in: Tensor | None, rotation: Rotation, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """The attention's output (T, C), and its own values (T, G, D) before anything was mixed in."""
        weights = (self.q.weight, self.k.weight, self.v.weight)
        q, k, v = (y_TC.unflatten(-1, (-1, self.head_dim)) for y_TC in linears(x_TC, *weights))
        q, k = norm_and_rotate(q, rotation), norm_and_rotate(k, rotation)
        y_THD = plan.attend(q, k, self.mix(v, mixed_in), self.head_dim**-0.5)
        return self.out(y_THD.flatten(-2)), v

    def mix(self, v: Tensor, mixed_in: Tensor | None) -> Tensor:
        if self.value_mix is None:
            return v
        if self.value_mix.ndim == 0:
            other = v if mixed_in is None else mixed_in
            return (1 - self.value_mix) * v + self.value_mix * other.to(v.dtype)
        return self.value_mix[0] * v if mixed_in is None else mix(self.value_mix, v, mixed_in.to(v.dtype))


class Block(nn.Module):
    roles: ClassVar[dict[str, Role]] = {"residual_mix": "scalar"}

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attention = None if layer in config.attention_free_layers else Attention(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, x0: Tensor, mixed_in: Tensor | None, rotation: Rotation, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after the block, and the values of its attention (None without attention)."""
        x = mix(self.residual_mix, x, x0)
        values = None
        if self.attention is not None:
            y, values = self.attention(rms_norm(x), mixed_in, rotation, plan)
            x = x + y
        return self.mlp(x), values
