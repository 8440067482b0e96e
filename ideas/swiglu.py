"""SwiGLU in place of ReLU²: a gated MLP with as many weights as the one it replaces.

https://arxiv.org/abs/2002.05202

Raced against softcap at nano, 160 steps, 5 seeds: helps, −0.0169 bits/byte (95 % CI −0.0231 to −0.0108).
"""

import torch.nn.functional as F
from torch import Tensor, nn

import hotlap
from hotlap.config import ModelConfig
from hotlap.model.layers import Matrix


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = 2 * config.mlp_ratio * config.width // 3  # three matrices instead of two
        self.gate = Matrix(config.width, hidden)
        self.expand = Matrix(config.width, hidden)
        self.out = Matrix(hidden, config.width, zero=True)

    def forward(self, x_TC: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x_TC)) * self.expand(x_TC))


idea = hotlap.idea(parent="softcap", mlp=SwiGLU)
