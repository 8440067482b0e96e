"""Rotary position embeddings (RoFormer, https://arxiv.org/abs/2104.09864).

Pairs of features of q and k are rotated by an angle proportional to the position. Feature i is
paired with feature i + D/2. `full` rotates every pair, at frequencies from 1 down to about 1 / base
radians per token. `half` rotates only the first half of the pairs and leaves the others unrotated.

Shapes: T tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn


class Rotation(NamedTuple):
    """cos and sin of the angles at T positions, each (T, 1, D/2), the same for every head."""

    cos: Tensor
    sin: Tensor


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def angular_frequencies(head_dim: int, kind: Literal["full", "half"], base: float) -> Tensor:
    """(D/2,) float32: radians per token of each pair."""
    pairs = head_dim // 2
    if kind == "full":
        return base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    rotated = base ** -torch.linspace(0, 1, steps=pairs // 2, dtype=torch.float32)
    return torch.cat([rotated, rotated.new_zeros(pairs - pairs // 2)])


class Rotary(nn.Module):
    """cos and sin, precomputed for positions below `max_tokens`. Not part of a checkpoint."""

    frequencies: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, kind: Literal["full", "half"], base: float, max_tokens: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", angular_frequencies(head_dim, kind, base), persistent=False)
        table = self.at(torch.arange(max_tokens), torch.float32)
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)

    def forward(self, count: int, dtype: torch.dtype) -> Rotation:
        """Positions 0 … count − 1."""
        assert count <= self.cos.size(0), f"{count} positions, but only {self.cos.size(0)} are precomputed"
        return Rotation(self.cos[:count].to(dtype), self.sin[:count].to(dtype))

    def at(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """Arbitrary positions. Equal to the precomputed values below `max_tokens`."""
        angles = torch.outer(positions_T.float(), self.frequencies)[:, None, :]
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
