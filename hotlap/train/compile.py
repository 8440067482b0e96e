"""What torch.compile is applied to, and the warmup that keeps compilation out of training time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import torch

from hotlap.config import Config
from hotlap.distributed.process_group import Distributed
from hotlap.errors import CompileError
from hotlap.files import cache_directory
from hotlap.kernels import Installed
from hotlap.optim import Muon
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.flops import matmul_flops_per_token

CPU_COMPILE_SECONDS = 30  # to compile blocks on a CPU with a cold cache, at most
CPU_COMPILE_GAIN = 0.2  # fraction of the training time that compiled blocks save on a CPU
# Speed of an uncompiled run on a CPU, to estimate its duration. Not measured, because a
# resumed run must make the same choice: compiled and uncompiled code round differently.
ASSUMED_GFLOPS_PER_THREAD = 30


class CompileChoice(NamedTuple):
    mode: str  # off, block, parts or model
    reason: str


def assumed_seconds(config: Config, dtype: torch.dtype, num_threads: int) -> float:
    """How long the run trains on so many threads of a CPU, without measuring it."""
    tokens = config.schedule.steps * config.batch.tokens_per_step
    gflops = ASSUMED_GFLOPS_PER_THREAD * num_threads * (2 if dtype == torch.bfloat16 else 1)
    return tokens * matmul_flops_per_token(config) / (gflops * 1e9)


def choose_mode(
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int,
    installed: Installed,
    world_size: int = 1,
) -> CompileChoice:
    """`auto` compiles on CUDA, and on a CPU without kernels if the run is long enough.

    On CUDA one graph is fastest, but the gradients of a graph are all ready at its end, too late to be
    reduced while the backward runs. With several ranks every part of the model is a graph.
    """
    asked = config.runtime.compile
    if asked != "auto":
        return CompileChoice(asked, "as configured")
    if config.runtime.reduction == "fixed":
        # What follows depends on the number of ranks and threads.
        return CompileChoice("off", "auto: the reduction is fixed")
    if device.type == "cuda" and world_size > 1:
        return CompileChoice("parts", "auto: gradients are reduced while the backward runs")
    if device.type == "cuda":
        return CompileChoice("model", "auto: always pays on CUDA")
    if device.type != "cpu":
        return CompileChoice("off", f"auto: not used on {device.type}")
    if installed.fuses_blocks:
        return CompileChoice("off", "auto: the kernels in C are as fast")
    seconds = assumed_seconds(config, dtype, num_threads)
    if seconds * CPU_COMPILE_GAIN > CPU_COMPILE_SECONDS:
        return CompileChoice("block", f"auto: pays in a run of about {seconds:.0f} s")
    return CompileChoice("off", f"auto: would not pay in a run of about {seconds:.0f} s")


def tunes_kernels(config: Config, device: torch.device) -> bool:
    """Coordinate-descent tuning is for the kernels of a GPU; elsewhere it would only cost time."""
    return config.runtime.coordinate_descent and device.type == "cuda"


def compiles_loss(config: Config, device: torch.device) -> bool:
    """Whether the loss will be part of a compiled graph.

    `kernels.install` asks before the mode is chosen, since on a CPU the mode depends on its answer.
    """
    asked = config.runtime.compile
    return asked in ("parts", "model") or (asked == "auto" and device.type == "cuda")


def compiles_optimizers(config: Config, device: torch.device) -> bool:
    """Whether Muon's math is compiled: on CUDA, unless compilation is off. On a CPU its kernels are in C."""
    return device.type == "cuda" and config.runtime.compile != "off"


def apply_compile(batch_loss: BatchLoss, mode: str, *, coordinate_descent: bool) -> None:
    """Compile the blocks alone (`block`), all parts one by one (`parts`), or all as one graph (`model`).

    The parts are the attention plans, the embeddings, each block, and the head with the loss. A backend
    that plans on the host keeps its plans uncompiled. With any other, whatever would break a graph of
    `parts` or `model` is an error.
    """
    if mode == "off":
        return
    model = batch_loss.model
    # The default is a temporary directory, which does not survive a reboot.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "compiled"))
    # The blocked backend returns a number of saved probabilities that depends on the mask. Without
    # this option the graph of every layer would break at its attention.
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    # All blocks share one forward function, which is compiled once per variant of block, with and
    # without gradients. Beyond its limit the compiler would leave the remaining blocks uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(model.blocks))
    if coordinate_descent:
        torch._inductor.config.coordinate_descent_tuning = True
    plans_on_device = batch_loss.masking.backend.plans_on_device
    if mode == "model":
        whole = batch_loss if plans_on_device else model
        whole.compile(dynamic=False, fullgraph=plans_on_device)
        return
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=plans_on_device and mode == "parts")
    if mode == "parts":
        if plans_on_device:
            compile_method(batch_loss.masking, "plans", fullgraph=True)
        for part in ("embed_tokens", "loss_of"):
            compile_method(model, part, fullgraph=plans_on_device)


def compile_method(owner: object, name: str, *, fullgraph: bool) -> None:
    """Compile a method of one object, as `nn.Module.compile` does with `forward`."""
    setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False, fullgraph=fullgraph))


def warm_up(batch_loss: BatchLoss, config: Config, distributed: Distributed) -> None:
    """Compile the training and validation shapes with dummy tokens. Leaves no gradients behind."""
    count = config.batch.sequence_tokens
    try:
        for sequences in micro_batch_sequences(config, distributed.world_size):
            tokens = torch.zeros(sequences * count, dtype=torch.int32, device=distributed.device)
            batch_loss(tokens, tokens.long(), count).backward()
        batch_loss.zero_grad(set_to_none=True)
        tokens = torch.zeros(config.validation_sequence_tokens, dtype=torch.int32, device=distributed.device)
        with torch.no_grad():
            batch_loss(tokens, tokens.long(), None, reduction="sum")
    except torch._dynamo.exc.Unsupported as error:
        raise CompileError(
            expected="a model that compiles without a graph break",
            found=f"a graph break at {_place_of_break(error)}: {_first_line(error)}",
            do="change that line, or compile the blocks alone with --compile block",
        ) from error


def warm_up_muon(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Compile Muon's math by a step that changes nothing: gradients and learning rates are zero.

    A collective with several ranks. Momentum must still be zero, as before the first step.
    """
    for muon in (optimizer for optimizer in optimizers if isinstance(optimizer, Muon)):
        rates = [group["lr"] for group in muon.param_groups]
        for group in muon.param_groups:
            group["lr"] = 0.0
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
        muon.step()
        muon.zero_grad(set_to_none=True)
        for group, rate in zip(muon.param_groups, rates, strict=True):
            group["lr"] = rate


def _place_of_break(error: torch._dynamo.exc.Unsupported) -> str:
    """The line of user code that the compiler could not trace."""
    if not error.real_stack:
        return "an unknown line"
    frame = error.real_stack[-1]
    return f"{frame.filename}:{frame.lineno}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def micro_batch_sequences(config: Config, world_size: int) -> set[int]:
    """Sizes of a rank's micro-batches in sequences.

    The last micro-batch of a step may be smaller.
    """
    per_rank = config.batch.tokens_per_step // config.batch.sequence_tokens // world_size
    micro = config.batch.micro_sequences
    return {min(micro, per_rank - start) for start in range(0, per_rank, micro)}


def max_micro_batch_tokens(config: Config, world_size: int) -> int:
    """Tokens in the largest micro-batch of a rank."""
    return max(micro_batch_sequences(config, world_size)) * config.batch.sequence_tokens
