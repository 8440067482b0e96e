"""Settings of the model and its attention."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from hotlap.config.checks import require, require_decay, require_not_negative, require_positive
from hotlap.settings import setting


@dataclass(frozen=True)
class ModelConfig:
    architecture: Literal["speedrun", "gpt2"] = setting("speedrun", "the records' model, or plain GPT-2")
    num_layers: int = setting(12, "transformer blocks; the first half is the U-Net's encoder")
    width: int = setting(768, "width of the residual stream")
    num_heads: int = setting(6, "query heads")
    num_kv_heads: int | None = setting(
        None, "key and value heads for grouped-query attention; none: same as num_heads"
    )
    mlp_ratio: int = setting(4, "hidden width of the MLP, as a multiple of width")
    vocab_size: int = setting(50257, "vocabulary size of the tokenizer")
    vocab_multiple: int = setting(128, "embedding and head rows are padded up to a multiple of this")
    rotary: Literal["full", "half"] = setting("full", "rotate all dimensions of q and k, or half of them")
    rotary_base: float = setting(10000.0, "base of the rotary frequencies")
    softcap: float = setting(30.0, "logits become softcap·tanh(logits/softcap); 0: no cap")
    # Value residual: https://arxiv.org/abs/2410.17897
    values: Literal["plain", "first-layer", "per-layer", "mirrored", "outer"] = setting(
        "first-layer",
        "mixed into v: nothing, the first layer's v, or value embeddings (one table per layer; one per"
        " encoder layer, mirrored in the decoder; or tables in the first and last quarter only)",
    )
    value_mix: Literal["one", "pair"] = setting("one", "v = (1−λ)v + λu with one λ, or λ₀v + λ₁u with two")
    value_tables: Literal["joined", "separate"] = setting(
        "joined", "value tables as one parameter, or one parameter per table"
    )
    bigram_rows: int = setting(
        0, "rows of the hashed bigram table that is added to the embedding; 0: no table"
    )
    drop_attention: bool = setting(False, "no attention in layer ⌊7·num_layers/12⌋")
    dropout: float = setting(
        0.0, "training: fraction of the features of x0, and of the last block's output, that are zeroed"
    )
    bf16_embeddings: bool = setting(False, "store embedding tables in bfloat16 when activations are bfloat16")

    def __post_init__(self) -> None:
        require_positive(
            self,
            "num_layers",
            "width",
            "num_heads",
            "mlp_ratio",
            "vocab_size",
            "vocab_multiple",
            "rotary_base",
        )
        require_not_negative(self, "softcap", "bigram_rows")
        require_decay(self, "dropout")
        require(
            self.width % self.num_heads == 0,
            "`width` divisible by `num_heads`",
            f"width {self.width} and {self.num_heads} heads",
            f"use a width of {self.num_heads * max(1, round(self.width / self.num_heads))}",
        )
        require(
            self.kv_heads > 0 and self.num_heads % self.kv_heads == 0,
            "`num_heads` divisible by `num_kv_heads`",
            f"{self.num_heads} heads and {self.num_kv_heads} kv heads",
            f"use one of {[n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]}",
        )
        require(
            self.head_dim % (4 if self.rotary == "half" else 2) == 0 or self.architecture == "gpt2",
            f"a head dimension divisible by {4 if self.rotary == 'half' else 2} for rotary={self.rotary}",
            f"{self.head_dim}",
            "change width or num_heads so that width / num_heads is a multiple of 4",
        )
        require(
            self.values != "mirrored" or self.num_layers % 2 == 0,
            "an even number of layers for values=mirrored",
            f"{self.num_layers}",
            f"use {self.num_layers + 1} layers, or change model.values",
        )
        if self.architecture == "gpt2":
            require(
                self.num_kv_heads is None and not self.bigram_rows and not self.dropout,
                "num_kv_heads none, bigram_rows 0 and dropout 0, because gpt2 supports none of them",
                f"num_kv_heads {self.num_kv_heads}, bigram_rows {self.bigram_rows}, dropout {self.dropout}",
                "leave them out, or use another recipe",
            )
        else:
            require(
                self.num_layers > 1,
                "at least two layers, one for the encoder and one for the decoder",
                "1",
                "add a layer, or use the recipe adamw",
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def attention_free_layers(self) -> tuple[int, ...]:
        return (7 * self.num_layers // 12,) if self.drop_attention else ()

    @property
    def value_table_of_layer(self) -> tuple[int | None, ...]:
        """For each layer, the index of the value-embedding table that it mixes in, or None."""
        layers = self.num_layers
        if self.values == "per-layer":
            tables = itertools.count()
            return tuple(
                None if layer in self.attention_free_layers else next(tables) for layer in range(layers)
            )
        if self.values == "mirrored":
            return (*range(layers // 2), *reversed(range(layers // 2)))
        if self.values == "outer":
            outer = tuple(range(layers // 4))
            return (*outer, *[None] * (layers - 2 * len(outer)), *outer)
        return (None,) * layers


@dataclass(frozen=True)
class AttentionConfig:
    backend: Literal["auto", "dense", "flex", "native", "blocked"] = setting(
        "auto", "flex on CUDA, native on a CPU with gcc, else blocked; dense is the slow reference"
    )
    window_unit: Literal["tokens", "blocks", "tokens-and-blocks", "unlimited"] = setting(
        "tokens",
        "unit of the sliding window; tokens-and-blocks: the last `window` tokens, as far as they are in the"
        " last ⌈window/block_size⌉ blocks; unlimited: all earlier tokens",
    )
    block_size: int = setting(128, "tokens per mask block")
    document_mask: bool = setting(True, "attend only within the same document")
    saved_probabilities_mb: int = setting(
        1024, "blocked backend: memory for attention probabilities saved for the backward, in MB"
    )

    def __post_init__(self) -> None:
        require_positive(self, "block_size")
        require_not_negative(self, "saved_probabilities_mb")
