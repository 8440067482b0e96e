"""A transformer block: residual mixing, masked attention with mixed-in values, ReLU² MLP.

Shapes: T tokens, C width, H query heads, G key/value heads, D head dim. The block works on one packed
sequence; which token sees which is the business of the attention plan that it is given.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hotlap.config import ModelConfig
from hotlap.model.inputs import inputs
from hotlap.model.layers import Matrix, mix
from hotlap.model.mlp import MLP
from hotlap.model.roles import Role
from hotlap.model.rotary import Rotation


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
        self,
        streams: tuple[Tensor, ...],
        stream_mix: Tensor,
        mixed_in: Tensor | None,
        rotation: Rotation,
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The mixed stream, (T, C); attention's output before its projection; its values (T, G, D); x0."""
        x_TC, weights = streams[0], (self.q.weight, self.k.weight, self.v.weight)
        mixed_in = None if mixed_in is None else mixed_in.to(x_TC.dtype)
        value_mix_2 = self.value_weights(x_TC, alone=mixed_in is None)
        mixed_TC, q, k, v, x0_TC = inputs(streams, stream_mix, weights, rotation, value_mix_2, mixed_in)
        y_THD = plan.attend(q, k, v, self.head_dim**-0.5)
        return mixed_TC, y_THD.flatten(-2), v, x0_TC

    def value_weights(self, x_TC: Tensor, *, alone: bool) -> Tensor:
        """What the values, and those mixed in, are multiplied by; (2,)."""
        if self.value_mix is None:
            return x_TC.new_tensor([1.0, 0.0])
        if self.value_mix.ndim == 1:
            return self.value_mix
        of_own, of_others = 1 - self.value_mix, self.value_mix
        # Alone, values are mixed with themselves.
        return torch.stack((of_own + of_others, 0 * of_others) if alone else (of_own, of_others))


class SkipConnection(NamedTuple):
    """What an encoder block left, and how much of it a decoder block adds to its stream."""

    x: Tensor  # (T, C)
    weight: Tensor  # ()


class Block(nn.Module):
    roles: ClassVar[dict[str, Role]] = {"residual_mix": "scalar"}

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.attention = None if layer in config.attention_free_layers else Attention(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        skip: SkipConnection | None,
        mixed_in: Tensor | None,
        rotation: Rotation,
        plan: AttentionPlan,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The stream after the block, the values of its attention (None without attention), and x0 as it was.

        Later blocks are to take the x0 that comes back (see `inputs`).
        """
        streams: tuple[Tensor, ...] = (x, x0)
        stream_mix: Tensor = self.residual_mix
        if skip is not None:
            # residual_mix · (x + weight · skip, x0), as one sum of three.
            streams = (*streams, skip.x)
            stream_mix = torch.cat((stream_mix, stream_mix[:1] * skip.weight))
        if self.attention is None:
            return self.mlp(mix(stream_mix, *streams)), None, x0
        x, attended, values, x0 = self.attention(streams, stream_mix, mixed_in, rotation, plan)
        # The MLP projects it: a kernel then has the sum still in a core's cache.
        return self.mlp(x, attended, self.attention.out.weight), values, x0
