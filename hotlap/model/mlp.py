"""The MLP: expand, ReLU² (https://arxiv.org/abs/2109.08668), project back."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.config import ModelConfig
from hotlap.model.layers import Matrix


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_ratio * config.width
        self.expand = Matrix(config.width, hidden)
        self.out = Matrix(hidden, config.width, zero=True)

    def forward(self, x_TC: Tensor) -> Tensor:
        hidden = F.relu(self.expand(x_TC))
        return self.out(hidden * hidden)
