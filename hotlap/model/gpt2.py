"""The baseline: GPT-2 as nanoGPT (https://github.com/karpathy/nanoGPT) trains it.

Learned positions, LayerNorm, GELU, full causal attention over a fixed context, head tied to the
embedding, no biases. Same interface as `GPT`; attention plans are used only for sampling.

Shapes: B sequences, S tokens of context, T = B·S tokens, C width, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.config import ModelConfig
from hotlap.model.attention import AttentionPlan
from hotlap.model.head import Loss, cross_entropy, softcapped
from hotlap.model.layers import Matrix, Table
from hotlap.model.roles import Role

# GPT-2's. Weights that write to the residual stream are scaled down further, by 1/√(2 · layers).
INITIAL_STD = 0.02


class LayerNorm(nn.Module):
    """Layer norm with a gain and no bias."""

    roles: ClassVar[dict[str, Role]] = {"weight": "scalar"}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype))


class GPT2Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp_ratio * config.width
        self.head_dim = config.head_dim
        self.attention_norm = LayerNorm(width)
        self.q, self.k, self.v, self.attention_out = (Matrix(width, width) for _ in range(4))
        self.mlp_norm = LayerNorm(width)
        self.expand = Matrix(width, hidden)
        self.mlp_out = Matrix(hidden, width)

    def forward(self, x_TC: Tensor, context: int, plan: AttentionPlan | None) -> Tensor:
        normed = self.attention_norm(x_TC)
        q, k, v = (matrix(normed).unflatten(-1, (-1, self.head_dim)) for matrix in (self.q, self.k, self.v))
        if plan is None:
            # (T, H, D) → (B, H, S, D)
            q, k, v = (part.unflatten(0, (-1, context)).transpose(1, 2) for part in (q, k, v))
            y_THD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)
        else:
            y_THD = plan.attend(q, k, v, self.head_dim**-0.5)
        x_TC = x_TC + self.attention_out(y_THD.flatten(-2))
        return x_TC + self.mlp_out(F.gelu(self.expand(self.mlp_norm(x_TC))))


class GPT2(nn.Module):
    def __init__(self, config: ModelConfig, max_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.max_tokens = max_tokens
        self.embed = Table(config.padded_vocab_size, config.width)
        self.positions = Table(max_tokens, config.width)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.num_layers))
        self.norm = LayerNorm(config.width)
        self.loss: Loss = cross_entropy
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                shrink = (2 * config.num_layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=INITIAL_STD * shrink)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def forward(
        self,
        tokens_T: Tensor,
        targets_T: Tensor,
        plans: Sequence[AttentionPlan] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Cross entropy in nats, float32: the mean or the sum over the tokens."""
        context = self.context(tokens_T, plans)
        x_TC = self.run_blocks(self.embed_tokens(tokens_T, context), context, plans)
        return self.loss_of(x_TC, targets_T, reduction)

    def hidden(
        self,
        tokens_T: Tensor,
        plans: Sequence[AttentionPlan] | None = None,
        positions_T: Tensor | None = None,
    ) -> Tensor:
        """(T, C): the input of the head. Without plans, T must be a multiple of the context."""
        context = self.context(tokens_T, plans)
        return self.norm(self.run_blocks(self.embed_tokens(tokens_T, context, positions_T), context, plans))

    def context(self, tokens_T: Tensor, plans: Sequence[AttentionPlan] | None) -> int:
        """S: how many tokens see one another. All of them if plans say which."""
        count = tokens_T.numel()
        context = min(count, self.max_tokens) if plans is None else count
        assert count % context == 0, f"{count} tokens are not a multiple of the context of {context}"
        return context

    def embed_tokens(self, tokens_T: Tensor, context: int, positions_T: Tensor | None = None) -> Tensor:
        """(T, C). `positions_T` defaults to 0 … S − 1 for every sequence."""
        if positions_T is None:
            positions_T = torch.arange(context, device=tokens_T.device).repeat(tokens_T.numel() // context)
        return (self.embed(tokens_T) + self.positions(positions_T)).to(self.dtype)

    def run_blocks(self, x_TC: Tensor, context: int, plans: Sequence[AttentionPlan] | None) -> Tensor:
        for layer, block in enumerate(self.blocks):
            x_TC = block(x_TC, context, plans[layer] if plans is not None else None)
        return x_TC

    def loss_of(self, x_TC: Tensor, targets_T: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        """The loss at the end of the residual stream."""
        x_TC = self.norm(x_TC)
        return self.loss(x_TC, self.embed.weight, targets_T, self.config.softcap, reduction=reduction)

    def logits(self, x_TC: Tensor) -> Tensor:
        """Logits (T, unpadded vocabulary), float32."""
        logits = F.linear(x_TC, self.embed.weight.to(x_TC.dtype))
        return softcapped(logits, self.config.softcap)[..., : self.config.vocab_size]
