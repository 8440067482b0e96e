"""What torch.compile is applied to, and the warm-up that keeps compilation out of the training time."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from hotlap.config import Config
from hotlap.distributed.process_group import Distributed
from hotlap.files import cache_directory
from hotlap.kernels import Installed
from hotlap.model import GPT, GPT2
from hotlap.train.flops import matmul_flops_per_token
from hotlap.train.masking import Masking

# Compiled blocks gain about a fifth on a CPU and cost up to this much time when the cache is cold.
CPU_COMPILE_SECONDS = 30
CPU_COMPILE_GAIN = 0.2
# What an uncompiled run does on a CPU, to estimate how long it will take. Not measured here and now: a run
# that is resumed must be compiled as before, or its numbers differ.
ASSUMED_GFLOPS_A_THREAD = 30


class CompileChoice(NamedTuple):
    mode: str  # off, block or model
    reason: str


def choose_mode(
    config: Config, device: torch.device, dtype: torch.dtype, all_threads: int, installed: Installed
) -> CompileChoice:
    """`auto` compiles blocks without kernels, in a run that is long enough to win back the time it takes."""
    asked = config.runtime.compile
    if asked != "auto":
        return CompileChoice(asked, "as asked for")
    if device.type == "cuda":
        return CompileChoice("model", "auto: always pays on CUDA")
    if device.type != "cpu":
        return CompileChoice("off", f"auto: not used on {device.type}")
    if installed.fuses_blocks:
        return CompileChoice("off", "auto: the kernels in C are as fast")
    tokens = config.schedule.steps * config.batch.tokens_per_step
    gflops = ASSUMED_GFLOPS_A_THREAD * all_threads * (2 if dtype == torch.bfloat16 else 1)
    seconds = tokens * matmul_flops_per_token(config) / (gflops * 1e9)
    if seconds * CPU_COMPILE_GAIN > CPU_COMPILE_SECONDS:
        return CompileChoice("block", f"auto: pays in a run of about {seconds:.0f} s")
    return CompileChoice("off", f"auto: would not pay in a run of about {seconds:.0f} s")


def apply_compile(model: GPT | GPT2, mode: str, *, coordinate_descent: bool) -> None:
    if mode == "off":
        return
    # The compiler's own choice is a temporary directory, which a restart of the machine empties.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "compiled"))
    # How many probabilities the blocked backend keeps depends on the mask; without this every layer's graph
    # would break at its attention.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    # Blocks share one function, compiled once for each kind of block, with and without gradients; beyond its
    # limit, which is 8, the compiler would leave the rest uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(model.blocks))
    if coordinate_descent:
        torch._inductor.config.coordinate_descent_tuning = True
    if mode == "model":
        model.compile(dynamic=False)
    else:
        for block in model.blocks:
            block.compile(dynamic=False)


def warm_up(model: GPT | GPT2, masking: Masking, config: Config, distributed: Distributed) -> None:
    """Compile the training and validation shapes on made-up tokens. Leaves no gradient and no other trace."""
    count = config.batch.sequence_tokens
    for sequences in sequences_at_once(config, distributed.world_size):
        tokens = torch.zeros(sequences * count, dtype=torch.int32, device=distributed.device)
        model(tokens, tokens.long(), masking.plans(tokens, count)).backward()
    model.zero_grad(set_to_none=True)
    tokens = torch.zeros(count, dtype=torch.int32, device=distributed.device)
    with torch.no_grad():
        model(tokens, tokens.long(), masking.plans(tokens, None), reduction="sum")


def sequences_at_once(config: Config, world_size: int) -> set[int]:
    """How many sequences a rank takes through the model at once; a step's last micro-batch may differ."""
    of_this_rank = config.batch.tokens_per_step // config.batch.sequence_tokens // world_size
    micro = config.batch.micro_sequences
    return {min(micro, of_this_rank - start) for start in range(0, of_this_rank, micro)}


def tokens_at_once(config: Config, world_size: int) -> int:
    """The most tokens that a rank takes through the model at once."""
    return max(sequences_at_once(config, world_size)) * config.batch.sequence_tokens
