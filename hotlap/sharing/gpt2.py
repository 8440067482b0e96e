"""The recipe `adamw` as the GPT-2 of `transformers`.

It has no biases, so those of GPT-2 are zero; its GELU is exact, not approximated by tanh; rows beyond the
tokenizer's vocabulary are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotlap.errors import ConfigError
from hotlap.inference.load import LoadedModel
from hotlap.model import GPT2

CLASS = "GPT2LMHeadModel"
# What `torch.nn.functional.layer_norm` takes where it is given none.
LAYER_NORM_EPSILON = 1e-5


def check_is_gpt2(loaded: LoadedModel) -> None:
    if loaded.config.model.softcap:
        raise ConfigError(
            expected="model.softcap 0, because GPT-2 caps no logits",
            found=str(loaded.config.model.softcap),
            do="export without --to, in Hotlap's own form",
        )


def config_values(loaded: LoadedModel) -> dict[str, Any]:
    """The content of `config.json`."""
    model = loaded.config.model
    assert isinstance(loaded.model, GPT2), "the architecture is gpt2"
    return {
        "model_type": "gpt2",
        "architectures": [CLASS],
        "vocab_size": loaded.tokenizer.vocab_size,
        "n_positions": loaded.model.max_tokens,
        "n_embd": model.width,
        "n_inner": model.mlp_ratio * model.width,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "activation_function": "gelu",
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    }


def weights(loaded: LoadedModel) -> dict[str, Tensor]:
    """{GPT-2's name: float32 tensor}. The head is the embedding, so it is not stored again."""
    stored = {name: tensor.float().cpu() for name, tensor in loaded.model.state_dict().items()}
    named = {
        "transformer.wte.weight": stored["embed.weight"][: loaded.tokenizer.vocab_size],
        "transformer.wpe.weight": stored["positions.weight"],
        **layer_norm("transformer.ln_f", stored["norm.weight"]),
    }
    for layer in range(loaded.config.model.num_layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        qkv = torch.cat([stored[f"{ours}.{part}.weight"] for part in ("q", "k", "v")])
        named |= {
            **layer_norm(f"{theirs}.ln_1", stored[f"{ours}.attention_norm.weight"]),
            **linear(f"{theirs}.attn.c_attn", qkv),
            **linear(f"{theirs}.attn.c_proj", stored[f"{ours}.attention_out.weight"]),
            **layer_norm(f"{theirs}.ln_2", stored[f"{ours}.mlp_norm.weight"]),
            **linear(f"{theirs}.mlp.c_fc", stored[f"{ours}.expand.weight"]),
            **linear(f"{theirs}.mlp.c_proj", stored[f"{ours}.mlp_out.weight"]),
        }
    return {name: tensor.contiguous() for name, tensor in named.items()}


def linear(name: str, weight: Tensor) -> dict[str, Tensor]:
    """GPT-2 stores (in, out), and a bias."""
    return {f"{name}.weight": weight.t(), f"{name}.bias": torch.zeros(len(weight))}


def layer_norm(name: str, gain: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": gain, f"{name}.bias": torch.zeros_like(gain)}
