"""Rotary positions: pairs of features of q and k are turned by an angle that grows with the position.

Feature i is paired with feature i + D/2. `full` turns every pair, with wavelengths from 1 to the base;
`half` turns only the first half of the pairs and leaves the others as they are.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn


class Rotation(NamedTuple):
    """cos and sin of the angles at some positions, each (T, 1, D/2): the same for every head."""

    cos: Tensor
    sin: Tensor


def angular_frequencies(head_dim: int, kind: Literal["full", "half"], base: float) -> Tensor:
    """Radians per token of each of the D/2 pairs, float32."""
    pairs = head_dim // 2
    if kind == "full":
        return base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    turning = base ** -torch.linspace(0, 1, steps=pairs // 2, dtype=torch.float32)
    return torch.cat([turning, turning.new_zeros(pairs - pairs // 2)])


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = rotation
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class Rotary(nn.Module):
    """Angles precomputed for every position up to a length; not part of a checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, kind: Literal["full", "half"], base: float, max_tokens: int) -> None:
        super().__init__()
        angles = torch.outer(
            torch.arange(max_tokens, dtype=torch.float32), angular_frequencies(head_dim, kind, base)
        )
        self.register_buffer("cos", angles.cos()[:, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None, :], persistent=False)

    def forward(self, start: int, count: int, dtype: torch.dtype) -> Rotation:
        end = start + count
        assert end <= self.cos.size(0), f"position {end} lies beyond the {self.cos.size(0)} precomputed"
        return Rotation(self.cos[start:end].to(dtype), self.sin[start:end].to(dtype))
