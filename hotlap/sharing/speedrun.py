"""The records' model as `modeling_hotlap.py` has it: one form for all recipes.

Tables that were joined are split, a single λ becomes the pair that computes the same, rows beyond the
tokenizer's vocabulary are left out, and the window is the one at the checkpoint's step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotlap.attention.mask import NO_TOKEN
from hotlap.inference.load import LoadedModel
from hotlap.model.bigrams import previous_stride

MODELING_FILE = "modeling_hotlap.py"
CLASS = "HotlapForCausalLM"


def config_values(loaded: LoadedModel) -> dict[str, Any]:
    """The content of `config.json`."""
    model, visibility = loaded.config.model, loaded.visibility
    in_tokens = visibility.unit in ("tokens", "tokens-and-blocks")
    in_blocks = visibility.unit in ("blocks", "tokens-and-blocks")
    module = MODELING_FILE.removesuffix(".py")
    return {
        "model_type": "hotlap",
        "architectures": [CLASS],
        "auto_map": {"AutoConfig": f"{module}.HotlapConfig", "AutoModelForCausalLM": f"{module}.{CLASS}"},
        "vocab_size": loaded.tokenizer.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.mlp_ratio * model.width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "attention_free_layers": list(model.attention_free_layers),
        "rotary": model.rotary,
        "rotary_base": model.rotary_base,
        "softcap": model.softcap,
        "value_table_of_layer": list(model.value_table_of_layer),
        "first_layer_values": model.values == "first-layer",
        "bigram_rows": model.bigram_rows,
        "bigram_stride": previous_stride(model.bigram_rows) if model.bigram_rows else 1,
        "window_tokens": visibility.window_tokens if in_tokens else None,
        "window_blocks": -(-visibility.window_tokens // visibility.block_size) if in_blocks else None,
        "block_tokens": visibility.block_size,
        "document_start": None if visibility.starts_document == NO_TOKEN else visibility.starts_document,
    }


def weights(loaded: LoadedModel) -> dict[str, Tensor]:
    """{name in the repository: float32 tensor}"""
    model, known = loaded.config.model, loaded.tokenizer.vocab_size
    stored = {name: tensor.float().cpu() for name, tensor in loaded.model.state_dict().items()}
    named: dict[str, Tensor] = {"embed.weight": stored.pop("embed.weight")[:known]}
    if model.bigram_rows:
        named["bigrams.weight"] = stored.pop("bigrams.table.weight")
    for number, table in enumerate(value_tables(loaded, stored)):
        named[f"value_tables.{number}.weight"] = table[:known]
    named["head.weight"] = stored.pop("head.weight")[:known]
    for layer, table_index in enumerate(model.value_table_of_layer):
        if layer not in model.attention_free_layers:
            name = f"blocks.{layer}.attention.value_mix"
            mixes = table_index is not None or (model.values == "first-layer" and layer > 0)
            named[name] = value_mix_pair(stored.pop(name, None), mixes=mixes)
    return {name: tensor.contiguous() for name, tensor in (named | stored).items()}


def value_tables(loaded: LoadedModel, stored: dict[str, Tensor]) -> list[Tensor]:
    """The tables apart, taken out of `stored`."""
    names = [name for name in stored if name.startswith("value_embeddings.tables.")]
    tables = [stored.pop(name) for name in names]
    count = 1 + max((t for t in loaded.config.model.value_table_of_layer if t is not None), default=-1)
    return list(tables[0].chunk(count, dim=-1)) if len(tables) < count else tables


def value_mix_pair(mix: Tensor | None, *, mixes: bool) -> Tensor:
    """(2,): the weights of v and of what is mixed into it, if the layer `mixes` something."""
    if mix is None:  # values are plain
        return torch.tensor([1.0, 0.0])
    if mix.ndim == 1:
        return mix
    return torch.stack([1 - mix, mix]) if mixes else torch.tensor([1.0, 0.0])
