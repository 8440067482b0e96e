"""What a run measures about itself besides the loss: work done, speed against the peak, memory.

Model FLOPs per token count 6 for every weight of a matrix product (blocks and head; embeddings are look-ups)
and 12 for every feature of every key that attention reads: forward, and twice that backward.
"""

from __future__ import annotations

import math
import resource
import sys

import torch

from hotlap.attention.visibility import window_tokens
from hotlap.config import Config
from hotlap.hardware import measure_matmul_gflops

# Dense bfloat16 peaks in TFLOP/s, from the makers' data sheets. Whole names as the driver gives them: a part
# of one would also match models with other peaks (Ti, D, Laptop GPU, NVL, a MIG slice).
KNOWN_GPU_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.4,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71.0,
}


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    return nats_per_token / math.log(2) / bytes_per_token


def matmul_flops_per_token(config: Config) -> int:
    """Forward and backward work of every matrix product with a weight."""
    model = config.model
    hidden = model.mlp_ratio * model.width
    attention = model.width * (2 * model.width + 2 * model.kv_heads * model.head_dim)
    layers_with_attention = model.num_layers - len(model.attention_free_layers)
    weights = model.num_layers * 2 * model.width * hidden + layers_with_attention * attention
    return 6 * (weights + model.padded_vocab_size * model.width)


def attention_flops_per_token(config: Config, keys_per_token: float) -> float:
    """Forward and backward work of attention that reads so many keys a token, over all layers."""
    model = config.model
    layers = model.num_layers - len(model.attention_free_layers)
    return 12 * layers * model.width * keys_per_token


def flops_per_token(config: Config, steps: int) -> float:
    """The mean over the first `steps` steps, whose windows may differ.

    Documents shorter than a window are not counted out.
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
    """Keys that a token of a context reads on average, its own among them, with a window within the context.

    The first tokens have fewer than a window before them.
    """
    return window_tokens - window_tokens * (window_tokens - 1) / (2 * context_tokens)


def peak_gflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's matrix-product peak: measured on a CPU, from a table on a GPU, None where unknown."""
    if device.type == "cpu":
        return measure_matmul_gflops(dtype=dtype)
    if device.type == "cuda" and dtype == torch.bfloat16:
        tflops = KNOWN_GPU_TFLOPS.get(torch.cuda.get_device_name(device))
        return None if tflops is None else tflops * 1000
    return None


def peak_memory_mib(device: torch.device) -> float:
    """The most memory that this process has held: allocated on a GPU, resident elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return peak_rss_mib()


def peak_reserved_mib(device: torch.device) -> float | None:
    """What the allocator held of a GPU at most; None elsewhere."""
    return torch.cuda.max_memory_reserved(device) / 2**20 if device.type == "cuda" else None


def peak_rss_mib() -> float:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10
