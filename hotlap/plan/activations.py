"""What the forward pass keeps for the backward pass, tensor by tensor.

On CUDA the model is compiled, and the compiler (the min-cut partitioner of torch 2.13) keeps what no
cheap operator can compute again: inputs and outputs of matmuls and of attention, and the residual
stream. Whatever is elementwise in between is computed again. The lists are the ones that it chooses for
the records' recipes, found by compiling them; `hotlap plan --exact` compiles any other. On a CPU the
kernels in C keep less.

Compiled as one graph, a block's input is kept as it left the block before and as it was mixed with the
embedding. Compiled in parts, block by block, the mixture is computed again, and the normalized
embedding and the rotary tables in the precision of the run, which every block reads, are kept once.

Shapes: T tokens of a micro-batch, C width, K = key/value heads · head dim.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hotlap.config import ModelConfig

Graphs = Literal["model", "parts"]  # what the compiler sees at once

STATISTIC_BYTES = 4  # of a norm or of attention, float32
INDEX_BYTES = 4
BLOCK_LISTS = 4  # full and partial blocks, by query and, for the backward pass, by key


class Kept(NamedTuple):
    name: str
    bytes: int


def compiled_activations(model: ModelConfig, tokens: int, element_bytes: int, graphs: Graphs) -> list[Kept]:
    """Of the records' model on CUDA, without the logits."""
    layers, with_attention = model.num_layers, layers_with_attention(model)
    stream = tokens * model.width * element_bytes  # (T, C)
    keys = tokens * model.kv_heads * model.head_dim * element_bytes  # (T, K)
    mixes_values = model.values != "plain"
    if graphs == "model":
        # The first block's follows from the embedding.
        mixtures = Kept("streams mixed with the embedding", (layers - 1) * stream)
    else:
        rotary = tokens * model.head_dim * element_bytes  # cos and sin of half of the dimensions each
        mixtures = Kept("normalized embedding, rotary tables", stream + rotary)
    norms = with_attention + layers + 2  # before attention and MLP, of the embedding, before the head
    heads = with_attention * (2 * model.num_heads + model.kv_heads)  # norms of q and k, log-sums
    return [
        Kept("embeddings", (2 if model.bigram_rows else 1) * stream + num_tables(model) * keys),
        # Of each block, after attention and after the MLP; without attention the former is the mixture.
        Kept("residual stream", (layers + with_attention) * stream),
        mixtures,
        Kept("inputs of matmuls", (with_attention + layers + 1) * stream),
        Kept("q, k, v as projected", with_attention * (stream + 2 * keys)),
        Kept("q, k, v as attended to", with_attention * (stream + (2 if mixes_values else 1) * keys)),
        Kept("output of attention", with_attention * stream),
        Kept("MLP before and after ReLU²", 2 * layers * model.mlp_ratio * stream),
        Kept("norms and log-sums", tokens * STATISTIC_BYTES * (norms + heads)),
    ]


def compiled_gpt2_activations(model: ModelConfig, tokens: int, element_bytes: int) -> list[Kept]:
    """Of GPT-2 on CUDA, whose attention is torch's scaled_dot_product_attention, without the logits."""
    layers = model.num_layers
    stream = tokens * model.width * element_bytes
    norms = 2 * (2 * layers + 1)  # mean and deviation
    return [
        Kept("residual stream", 2 * layers * stream),
        Kept("inputs of matmuls", (2 * layers + 1) * stream),
        Kept("q, k, v and output of attention", 4 * layers * stream),
        Kept("MLP before and after GELU", 2 * layers * model.mlp_ratio * stream),
        Kept("norms and log-sums", tokens * STATISTIC_BYTES * (norms + layers * model.num_heads)),
    ]


def cpu_activations(model: ModelConfig, tokens: int, element_bytes: int) -> list[Kept]:
    """Of the records' model by the kernels in C: each block keeps its input and what each kernel hands on."""
    layers, with_attention = model.num_layers, layers_with_attention(model)
    stream = tokens * model.width * element_bytes
    keys = tokens * model.kv_heads * model.head_dim * element_bytes
    norms = with_attention + layers + 2
    heads = with_attention * (2 * model.num_heads + model.kv_heads)
    # The first layer's values are computed once more: from the mixed stream, by its norm.
    first_values = 2 * stream + keys if model.values == "first-layer" else 0
    return [
        Kept("embeddings", 2 * stream + num_tables(model) * keys + first_values),
        # Without attention a block mixes its input in PyTorch, which keeps it with the skip and mixed.
        Kept("residual stream", (layers + with_attention + 2 * (layers - with_attention)) * stream),
        Kept("q, k, v as attended to", with_attention * (stream + 2 * keys)),
        Kept("output of attention", with_attention * stream),
        Kept("MLP after ReLU", layers * model.mlp_ratio * stream),
        Kept("norms and log-sums", tokens * STATISTIC_BYTES * (norms + heads)),
    ]


def mask_bytes(tokens: int, block_size: int) -> int:
    """Of the mask's plan: lists of key blocks per query block, and the document of each token."""
    blocks = tokens // block_size
    return BLOCK_LISTS * blocks * (blocks + 1) * INDEX_BYTES + tokens * INDEX_BYTES


def layers_with_attention(model: ModelConfig) -> int:
    return model.num_layers - len(model.attention_free_layers)


def num_tables(model: ModelConfig) -> int:
    return 1 + max((table for table in model.value_table_of_layer if table is not None), default=-1)
