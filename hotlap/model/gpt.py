"""The language model of the records, top to bottom: embedding, encoder half, decoder half, head.

The architecture is that of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt). The
model takes one packed sequence of tokens and one attention plan per layer. Encoder outputs enter
the decoder half as skip connections, last one first (U-Net).

Shapes: T tokens, C width, V padded vocabulary, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.config import ModelConfig
from hotlap.model.attention import Attention, AttentionPlan
from hotlap.model.bigrams import BigramEmbedding
from hotlap.model.block import Block, SkipConnection
from hotlap.model.embeddings import ValueEmbeddings
from hotlap.model.head import Head, Loss, cross_entropy
from hotlap.model.layers import Table, norm
from hotlap.model.parts import STANDARD, Parts
from hotlap.model.roles import Role
from hotlap.model.rotary import Rotary, Rotation


class Embedded(NamedTuple):
    """What every block reads beside the residual stream."""

    x0: Tensor  # (T, C): the normalized embedding, with which the stream starts
    value_embeddings: list[Tensor | None]  # per layer, (T, G, D)
    rotation: Rotation


class GPT(nn.Module):
    roles: ClassVar[dict[str, Role]] = {"skip_weights": "scalar"}

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        dtype: torch.dtype = torch.float32,
        parts: Parts = STANDARD,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.num_skips = config.num_layers // 2
        self.embed: Table = parts.embedding(config.vocab_size, config.width)
        self.bigrams = BigramEmbedding(config.bigram_rows, config.width) if config.bigram_rows else None
        self.value_embeddings: ValueEmbeddings = parts.value_embeddings(config)
        self.rotary = Rotary(config.head_dim, config.rotary, config.rotary_base, max_tokens)
        self.blocks = nn.ModuleList(
            parts.block(config, layer, parts.attention, parts.mlp) for layer in range(config.num_layers)
        )
        # In decoder order: the first one weights the output of the last encoder block.
        self.skip_weights = nn.Parameter(torch.ones(self.num_skips))
        self.head: Head = parts.head(config.width, config.padded_vocab_size, config.softcap)
        self.loss: Loss = cross_entropy
        if config.bf16_embeddings and dtype == torch.bfloat16:
            for module in self.modules():
                if isinstance(module, Table):
                    module.bfloat16()

    @property
    def device(self) -> torch.device:
        return self.skip_weights.device

    def forward(
        self,
        tokens_T: Tensor,
        targets_T: Tensor,
        plans: Sequence[AttentionPlan],
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Cross entropy in nats, float32: the mean or the sum over the tokens."""
        x_TC = self.run_blocks(self.embed_tokens(tokens_T, plans), plans)
        return self.loss_of(x_TC, targets_T, reduction)

    def hidden(
        self, tokens_T: Tensor, plans: Sequence[AttentionPlan], positions_T: Tensor | None = None
    ) -> Tensor:
        """(T, C): the input of the head. `positions_T` defaults to 0 … T − 1."""
        return norm(self.run_blocks(self.embed_tokens(tokens_T, plans, positions_T), plans))

    def embed_tokens(
        self, tokens_T: Tensor, plans: Sequence[AttentionPlan], positions_T: Tensor | None = None
    ) -> Embedded:
        if positions_T is None:
            rotation = self.rotary(tokens_T.numel(), self.dtype)
        else:
            rotation = self.rotary.at(positions_T, self.dtype)
        x = self.embed(tokens_T).to(self.dtype)
        if self.bigrams is not None:
            x = x + self.bigrams(tokens_T, plans[0].previous(tokens_T)).to(self.dtype)
        x0 = self.drop_out(norm(x))
        if self.config.values == "first-layer":
            return Embedded(x0, self.first_layer_values(x0), rotation)
        return Embedded(x0, self.value_embeddings(tokens_T), rotation)

    def drop_out(self, x_TC: Tensor) -> Tensor:
        """Dropout (https://jmlr.org/papers/v15/srivastava14a.html), where gradients are computed."""
        if not (self.config.dropout and self.training and torch.is_grad_enabled()):
            return x_TC
        return F.dropout(x_TC, self.config.dropout)

    def run_blocks(self, embedded: Embedded, plans: Sequence[AttentionPlan]) -> Tensor:
        """(T, C): the residual stream after the encoder half and the decoder half."""
        x0, value_embeddings, rotation = embedded
        first_decoder = self.config.num_layers - self.num_skips
        skip_weights = self.skip_weights.unbind()
        encoder_outputs: list[Tensor] = []
        x = x0
        for layer, block in enumerate(self.blocks):
            skip = None
            if layer >= first_decoder:
                skip = SkipConnection(encoder_outputs.pop(), skip_weights[layer - first_decoder])
            x = block(x, x0, skip, value_embeddings[layer], rotation, plans[layer])
            if layer < self.num_skips:
                encoder_outputs.append(x)
        return x

    def loss_of(self, x_TC: Tensor, targets_T: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
        """The loss at the end of the residual stream."""
        x_TC = self.drop_out(norm(x_TC))
        if type(self.head) is not Head:  # of another class, which may compute other logits
            return F.cross_entropy(self.head(x_TC).float(), targets_T, reduction=reduction)
        return self.loss(x_TC, self.head.weight, targets_T, self.head.softcap, reduction=reduction)

    def first_layer_values(self, x0_TC: Tensor) -> list[Tensor | None]:
        """The values of the first layer, (T, G, D), for every later layer; None for the first.

        This is the value residual (https://arxiv.org/abs/2410.17897). The values are computed a
        second time here, so that a block returns only the residual stream. A compiler merges them.
        """
        block = cast(Block, self.blocks[0])
        attention = cast(Attention, block.attention)
        values_TGD = attention.heads(attention.v(norm(block.mix(x0_TC, x0_TC, None))))
        return [None, *[values_TGD] * (self.config.num_layers - 1)]

    def logits(self, x_TC: Tensor) -> Tensor:
        """Softcapped logits (T, unpadded vocabulary), float32."""
        logits_TV: Tensor = self.head(x_TC)
        return logits_TV[..., : self.config.vocab_size]
