"""A model trained with Hotlap, for `transformers`: one file of plain PyTorch, which needs no Hotlap.

The architecture is that of the modded-nanogpt speedrun (https://github.com/KellerJordan/modded-nanogpt): a
U-Net of transformer blocks with QK norm, rotary positions, value embeddings, ReLU² and softcapped logits. A
query sees a window of its own document. Padding may be on either side, with an `attention_mask`.

Part of Hotlap, MIT license. The license of the weights is not stated by this file.

Shapes: B sequences, T new tokens, S all tokens with the cached ones, C width, H query heads, G key/value
heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

NO_TOKEN = -1


class HotlapConfig(PretrainedConfig):
    model_type = "hotlap"

    def __init__(
        self,
        vocab_size: int = 512,
        hidden_size: int = 64,
        intermediate_size: int = 256,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 2,
        attention_free_layers: list[int] | None = None,
        rotary: str = "full",  # or "half": only the first half of the pairs is rotated
        rotary_base: float = 10000.0,
        softcap: float = 0.0,  # 0: no cap
        # Per layer, the table whose rows are mixed into its values, or None.
        value_table_of_layer: list[int | None] | None = None,
        first_layer_values: bool = False,  # every later layer mixes in the values of the first
        bigram_rows: int = 0,  # 0: no table
        bigram_stride: int = 1,  # rows between two consecutive previous tokens
        # A query at position q sees a key at position k if q − k < window_tokens, and if
        # ⌊q / block_tokens⌋ − ⌊k / block_tokens⌋ < window_blocks. None: no such limit.
        window_tokens: int | None = None,
        window_blocks: int | None = None,
        block_tokens: int = 128,
        document_start: int | None = None,  # the token with which a document starts; None: one document
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.attention_free_layers = attention_free_layers or []
        self.rotary = rotary
        self.rotary_base = rotary_base
        self.softcap = softcap
        self.value_table_of_layer = value_table_of_layer or [None] * num_hidden_layers
        self.first_layer_values = first_layer_values
        self.bigram_rows = bigram_rows
        self.bigram_stride = bigram_stride
        self.window_tokens = window_tokens
        self.window_blocks = window_blocks
        self.block_tokens = block_tokens
        self.document_start = document_start
        kwargs.pop("head_dim", None)
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


class HotlapCache(DynamicCache):
    """Keys and values of the layers with attention, after the tokens themselves.

    What a token sees depends on the tokens before it: on where its document starts, and on its predecessor.
    They are kept as entry 0, so that whatever reorders, repeats or crops the cache does the same to them.
    """

    def read(self, tokens_BT: Tensor) -> Tensor:
        """Append new tokens. Returns all of them, (B, S)."""
        entry_B1T1 = tokens_BT[:, None, :, None]
        return self.update(entry_B1T1, entry_B1T1, 0)[0][:, 0, :, 0]


class Context(NamedTuple):
    """Where the new tokens stand, and what they see."""

    rotation: tuple[Tensor, Tensor]  # cos and sin, each (B, 1, T, D/2)
    previous: Tensor  # (B, T): the token before each one in its document, NO_TOKEN at its start
    visible: Tensor  # (B, 1, T, S) bool


def look_around(config: HotlapConfig, tokens_BS: Tensor, mask_BS: Tensor | None, count: int) -> Context:
    """The context of the last `count` of all tokens. `mask_BS` is False for padding."""
    total = tokens_BS.size(1)
    columns_S = torch.arange(total, device=tokens_BS.device)
    real_BS = torch.ones_like(tokens_BS, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
    # Padding takes no position: the first real token of a row is at 0.
    positions_BS = (real_BS.long().cumsum(1) - 1).clamp(min=0)
    starts_BS = torch.zeros_like(real_BS)
    if config.document_start is not None:
        starts_BS = real_BS & (tokens_BS == config.document_start)
    documents_BS = starts_BS.long().cumsum(1)

    newest_real_BS = columns_S.where(real_BS, NO_TOKEN).cummax(1).values
    before_BS = F.pad(newest_real_BS[:, :-1], (1, 0), value=NO_TOKEN)  # column of the predecessor
    previous_BS = tokens_BS.gather(1, before_BS.clamp(min=0))
    previous_BS = previous_BS.masked_fill(starts_BS | (before_BS == NO_TOKEN), NO_TOKEN)

    queries_BT1, keys_B1S = positions_BS[:, -count:, None], positions_BS[:, None, :]
    visible_BTS = (keys_B1S <= queries_BT1) & real_BS[:, None, :]
    visible_BTS &= documents_BS[:, -count:, None] == documents_BS[:, None, :]
    if config.window_tokens is not None:
        visible_BTS &= queries_BT1 - keys_B1S < config.window_tokens
    if config.window_blocks is not None:
        block = config.block_tokens
        visible_BTS &= queries_BT1 // block - keys_B1S // block < config.window_blocks
    # Padding sees itself: a softmax over nothing would be NaN.
    visible_BTS |= columns_S[-count:, None] == columns_S
    rotation = rotation_at(config, positions_BS[:, -count:])
    return Context(rotation, previous_BS[:, -count:], visible_BTS[:, None])


def rotation_at(config: HotlapConfig, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, each (B, 1, T, D/2) float32; feature i is paired with feature i + D/2."""
    pairs, base = config.head_dim // 2, config.rotary_base
    if config.rotary == "full":
        frequencies = base ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    else:
        rotated = base ** -torch.linspace(0, 1, steps=pairs // 2, dtype=torch.float32)
        frequencies = F.pad(rotated, (0, pairs - pairs // 2))
    angles = positions_BT[:, None, :, None].float() * frequencies.to(positions_BT.device)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x_BHTD.chunk(2, dim=-1)
    cos, sin = (part.to(x_BHTD.dtype) for part in rotation)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class HotlapAttention(nn.Module):
    def __init__(self, config: HotlapConfig, cache_entry: int) -> None:
        super().__init__()
        self.cache_entry = cache_entry
        self.head_dim = config.head_dim
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_width, bias=False)
        self.v = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(
        self, x_BTC: Tensor, value_embedding: Tensor | None, context: Context, cache: HotlapCache | None
    ) -> Tensor:
        q, k, v = (self.heads(project(x_BTC)) for project in (self.q, self.k, self.v))
        q, k = rotate(norm(q), context.rotation), rotate(norm(k), context.rotation)
        v = self.value_mix[0] * v
        if value_embedding is not None:
            v = v + self.value_mix[1] * value_embedding
        if cache is not None:
            k, v = cache.update(k, v, self.cache_entry)
        y_BHTD = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=context.visible,
            scale=self.head_dim**-0.5,
            enable_gqa=q.size(1) != k.size(1),
        )
        return self.out(y_BHTD.transpose(1, 2).flatten(-2))

    def heads(self, features_BTF: Tensor) -> Tensor:
        """(B, T, heads · D) → (B, heads, T, D)"""
        return features_BTF.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class HotlapMLP(nn.Module):
    def __init__(self, config: HotlapConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.out = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.out(F.relu(self.expand(x_BTC)).square())


class HotlapBlock(nn.Module):
    def __init__(self, config: HotlapConfig, layer: int) -> None:
        super().__init__()
        self.residual_mix = nn.Parameter(torch.tensor([1.0, 0.0]))
        has_attention = layer not in config.attention_free_layers
        cache_entry = 1 + layer - sum(free < layer for free in config.attention_free_layers)
        self.attention = HotlapAttention(config, cache_entry) if has_attention else None
        self.mlp = HotlapMLP(config)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        value_embedding: Tensor | None,
        context: Context,
        cache: HotlapCache | None,
    ) -> Tensor:
        x = self.mix(x, x0)
        if self.attention is not None:
            x = x + self.attention(norm(x), value_embedding, context, cache)
        return x + self.mlp(norm(x))

    def mix(self, x: Tensor, x0: Tensor) -> Tensor:
        return self.residual_mix[0] * x + self.residual_mix[1] * x0


class HotlapForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = HotlapConfig
    base_model_prefix = ""
    _supports_sdpa = True

    def __init__(self, config: HotlapConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, range(config.num_hidden_layers)
        self.embed = nn.Embedding(config.vocab_size, width)
        self.bigrams = nn.Embedding(config.bigram_rows, width) if config.bigram_rows else None
        num_tables = 1 + max((t for t in config.value_table_of_layer if t is not None), default=-1)
        value_width = config.num_key_value_heads * config.head_dim
        self.value_tables = nn.ModuleList(
            nn.Embedding(config.vocab_size, value_width) for _ in range(num_tables)
        )
        self.blocks = nn.ModuleList(HotlapBlock(config, layer) for layer in layers)
        # In decoder order: the first one weights the output of the last encoder block.
        self.skip_weights = nn.Parameter(torch.ones(config.num_hidden_layers // 2))
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        for name in ("inputs_embeds", "position_ids"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"{name} is not supported: give input_ids and an attention_mask")
        cache = own_cache(past_key_values) if use_cache or past_key_values is not None else None
        tokens_BS = input_ids if cache is None else cache.read(input_ids)
        if attention_mask is not None and attention_mask.shape != tokens_BS.shape:
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)}: expected {tuple(tokens_BS.shape)},"
                " one entry for every token, with those in the cache"
            )
        context = look_around(self.config, tokens_BS, attention_mask, input_ids.size(1))

        x_BTC = norm(self.run_blocks(input_ids, context, cache))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(x_BTC[:, kept]).float()
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output.to_tuple() if return_dict is False else output

    def run_blocks(self, tokens_BT: Tensor, context: Context, cache: HotlapCache | None) -> Tensor:
        """(B, T, C): the residual stream after the encoder half and the decoder half."""
        x = self.embed(tokens_BT)
        if self.bigrams is not None:
            pairs_BT = self.config.bigram_stride * context.previous + tokens_BT
            x = x + self.bigrams(pairs_BT % self.config.bigram_rows)
        x = x0 = norm(x)
        value_embeddings = self.value_embeddings(tokens_BT, x0)
        num_skips = len(self.skip_weights)
        first_decoder = len(self.blocks) - num_skips
        encoder_outputs: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if layer >= first_decoder:
                x = x + self.skip_weights[layer - first_decoder] * encoder_outputs.pop()
            x = block(x, x0, value_embeddings[layer], context, cache)
            if layer < num_skips:
                encoder_outputs.append(x)
        return x

    def value_embeddings(self, tokens_BT: Tensor, x0_BTC: Tensor) -> list[Tensor | None]:
        """Per layer, what is mixed into its values, (B, G, T, D), or None."""
        if self.config.first_layer_values:
            first: Any = self.blocks[0]
            attention = first.attention
            values = attention.heads(attention.v(norm(first.mix(x0_BTC, x0_BTC))))
            return [None, *[values] * (len(self.blocks) - 1)]
        split = (-1, self.config.head_dim)
        rows = [table(tokens_BT).unflatten(-1, split).transpose(1, 2) for table in self.value_tables]
        return [None if table is None else rows[table] for table in self.config.value_table_of_layer]


def own_cache(given: Any) -> HotlapCache:
    """`given`, or a new cache in the place of none and of the empty one that `generate` brings."""
    if isinstance(given, HotlapCache):
        return given
    if given is None or (type(given) is DynamicCache and given.get_seq_length() == 0):
        return HotlapCache()
    raise ValueError(f"{type(given).__name__} is not supported: use the cache that this model returns")
