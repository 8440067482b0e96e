"""FLOPs per token, peak FLOP/s of the device, peak memory.

Model FLOPs per token, forward plus backward: 6 per matmul weight (blocks and head; embeddings are
lookups), and per layer 12 · width per key that a query attends to. The backward pass counts as
twice the forward pass.
"""

from __future__ import annotations

import math
import resource
import sys

import torch

from hotlap.attention.visibility import window_tokens
from hotlap.config import Config
from hotlap.gpus import bf16_tflops
from hotlap.hardware import measure_matmul_gflops


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    return nats_per_token / math.log(2) / bytes_per_token


def matmul_flops_per_token(config: Config) -> int:
    """Forward and backward FLOPs per token of all matmuls with weights."""
    model = config.model
    hidden = model.mlp_ratio * model.width
    attention = model.width * (2 * model.width + 2 * model.kv_heads * model.head_dim)
    layers_with_attention = model.num_layers - len(model.attention_free_layers)
    weights = model.num_layers * 2 * model.width * hidden + layers_with_attention * attention
    return 6 * (weights + model.padded_vocab_size * model.width)


def attention_flops_per_token(config: Config, keys_per_token: float) -> float:
    """Forward and backward FLOPs per token of attention to `keys_per_token` keys, all layers."""
    model = config.model
    layers = model.num_layers - len(model.attention_free_layers)
    return 12 * layers * model.width * keys_per_token


def flops_per_token(config: Config, steps: int) -> float:
    """Model FLOPs per token, averaged over the windows of the first `steps` steps.

    Document boundaries, which shorten the attention further, are ignored.
    """
    context = config.batch.sequence_tokens
    if config.data.order == "shuffled":
        context = min(context, config.data.chunk_tokens)
    if config.attention.window_unit == "unlimited":
        keys = mean_keys(context, context)
    else:
        windows = (min(context, window_tokens(step, config.schedule)) for step in range(steps))
        keys = sum(mean_keys(window, context) for window in windows) / steps
    return matmul_flops_per_token(config) + attention_flops_per_token(config, keys)


def mean_keys(window_tokens: int, context_tokens: int) -> float:
    """Mean number of keys per query, including its own, for window_tokens ≤ context_tokens.

    The first queries of a context see fewer keys than the window holds.
    """
    return window_tokens - window_tokens * (window_tokens - 1) / (2 * context_tokens)


def peak_gflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak matmul GFLOP/s: measured on a CPU, from a table on a GPU, None if unknown."""
    if device.type == "cpu":
        return measure_matmul_gflops(dtype=dtype)
    if device.type == "cuda" and dtype == torch.bfloat16:
        tflops = bf16_tflops(torch.cuda.get_device_name(device))
        return None if tflops is None else tflops * 1000
    return None


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this process in MiB: allocated on a GPU, resident elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return peak_rss_mib()


def peak_reserved_mib(device: torch.device) -> float | None:
    """Peak memory that the caching allocator reserved on a GPU, in MiB; None on other devices."""
    return torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else None


def peak_rss_mib() -> float:
    """Peak resident memory of this process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, KiB on Linux.
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
