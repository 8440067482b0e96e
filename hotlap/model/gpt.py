"""The records' language model, top to bottom: embedding, encoder half, decoder half, head.

The model sees one packed sequence of tokens and one attention plan per layer, and computes in the dtype it is
given. Shapes: T tokens, C width, V vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from hotlap.config import ModelConfig
from hotlap.model.bigrams import BigramEmbedding
from hotlap.model.block import AttentionPlan, Block, SkipConnection
from hotlap.model.head import softcapped, softcapped_cross_entropy
from hotlap.model.layers import Head, Table, rms_norm
from hotlap.model.roles import Role
from hotlap.model.rotary import Rotary
from hotlap.model.value_embeddings import ValueEmbeddings


class GPT(nn.Module):
    roles: ClassVar[dict[str, Role]] = {"skip_weights": "scalar"}

    def __init__(self, config: ModelConfig, max_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.num_skips = config.num_layers // 2
        self.embed = Table(config.vocab_size, config.width)
        self.bigrams = BigramEmbedding(config.bigram_rows, config.width) if config.bigram_rows else None
        self.value_embeddings = ValueEmbeddings(config)
        self.rotary = Rotary(config.head_dim, config.rotary, config.rotary_base, max_tokens)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        # In decoder order: the first belongs to the encoder's last output.
        self.skip_weights = nn.Parameter(torch.ones(self.num_skips))
        self.head = Head(config.width, config.padded_vocab_size, zero=True)
        if config.bf16_embeddings and dtype == torch.bfloat16:
            for module in self.modules():
                if isinstance(module, Table):
                    module.bfloat16()

    def forward(
        self,
        tokens_T: Tensor,
        targets_T: Tensor,
        plans: Sequence[AttentionPlan],
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """The cross entropy of the targets in nats, float32, its mean or sum over the tokens."""
        x_TC = self.hidden(tokens_T, plans)
        return softcapped_cross_entropy(
            x_TC, self.head.weight, targets_T, self.config.softcap, reduction=reduction
        )

    def hidden(
        self, tokens_T: Tensor, plans: Sequence[AttentionPlan], positions_T: Tensor | None = None
    ) -> Tensor:
        """What the head is applied to, (T, C). Without positions, the tokens start a sequence."""
        if positions_T is None:
            rotation = self.rotary(tokens_T.numel(), self.dtype)
        else:
            rotation = self.rotary.at(positions_T, self.dtype)
        mixed_in = self.value_embeddings(tokens_T)
        embedded = self.embed(tokens_T).to(self.dtype)
        if self.bigrams is not None:
            embedded = embedded + self.bigrams(tokens_T, plans[0].previous(tokens_T)).to(self.dtype)
        x = x0 = rms_norm(embedded)
        first_decoder = self.config.num_layers - self.num_skips
        encoder_outputs: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            skip = None
            if layer >= first_decoder:
                skip = SkipConnection(encoder_outputs.pop(), self.skip_weights[layer - first_decoder])
            x, values, x0 = block(x, x0, skip, mixed_in[layer], rotation, plans[layer])
            if self.config.values == "first-layer" and layer == 0:
                mixed_in = [values] * self.config.num_layers
            if layer < self.num_skips:
                encoder_outputs.append(x)
        return rms_norm(x)

    def logits(self, x_TC: Tensor) -> Tensor:
        """Softcapped logits (T, vocabulary without padding), float32."""
        return softcapped(self.head(x_TC), self.config.softcap)[..., : self.config.vocab_size]
