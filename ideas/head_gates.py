"""A gate per attention head: a sigmoid of the token scales what each head writes.

Gated attention (https://arxiv.org/abs/2505.06708), with one number per head instead of one per feature. The
gates begin at 1, so that a new model computes what its parent does.

Raced against softcap at nano, 160 steps, 3 seeds: helps, −0.0099 bits/byte (95 % CI −0.0138 to −0.0061).
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotlap
from hotlap.config import ModelConfig
from hotlap.model.attention import Attention, AttentionPlan
from hotlap.model.layers import norm
from hotlap.model.roles import Role
from hotlap.model.rotary import Rotation, rotate


class GatedAttention(Attention):
    roles: ClassVar[dict[str, Role]] = {**Attention.roles, "gate": "scalar"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.gate = nn.Parameter(torch.zeros(self.num_heads, config.width))

    def forward(
        self, x_TC: Tensor, value_embedding_TGD: Tensor | None, rotation: Rotation, plan: AttentionPlan
    ) -> Tensor:
        q, k, v = (self.heads(project(x_TC)) for project in (self.q, self.k, self.v))
        q, k = rotate(norm(q), rotation), rotate(norm(k), rotation)
        y_THD = plan.attend(q, k, self.mix_values(v, value_embedding_TGD), self.head_dim**-0.5)
        gates_TH = 2 * torch.sigmoid(F.linear(x_TC, self.gate.to(x_TC.dtype)))
        return self.out((y_THD * gates_TH[..., None]).flatten(-2))


idea = hotlap.idea("softcap", attention=GatedAttention)
