"""Whether a run fits a machine, the most that fits, and what to change where it does not."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from hotlap.config import BatchConfig, Config
from hotlap.errors import ConfigError
from hotlap.hardware import select_precision
from hotlap.kernels import Installed
from hotlap.kernels.chunked_loss import DEFAULT_CHUNK_TOKENS
from hotlap.kernels.cuda.head_choice import HeadChoice, choose_head
from hotlap.optim.chunks import MatrixSpec, plan_chunks
from hotlap.plan.activations import Graphs
from hotlap.plan.kernels import KernelFit
from hotlap.plan.machine import Machine
from hotlap.plan.memory import Memory, StepShape, step_memory
from hotlap.plan.state import ModelState, matrix_specs, meta_model, model_state, total_bytes
from hotlap.train.compile import choose_mode, compiles_loss
from hotlap.train.run import check_ranks

MIB = 2**20
MOST_TOKENS = 2**21  # that are tried; the mask's block lists grow with the square of a sequence


def precision_of(config: Config, machine: Machine) -> torch.dtype:
    if machine.device == "cpu":
        return select_precision(config.runtime.precision, torch.device("cpu"))
    return torch.float32 if config.runtime.precision == "float32" else torch.bfloat16


def loss_of(config: Config, machine: Machine, tokens: int, dtype: torch.dtype) -> HeadChoice:
    """How a run computes its loss there."""
    vocabulary = config.model.padded_vocab_size
    if machine.device == "cpu":
        chunk = min(tokens, DEFAULT_CHUNK_TOKENS)
        return HeadChoice("torch", chunk, 2 * chunk * vocabulary * 4, f"chunks of {chunk:,} tokens")
    return choose_head(
        memory_bytes=machine.memory_bytes,
        tokens=tokens,
        vocabulary=vocabulary,
        element_bytes=dtype.itemsize,
        compiled=compiles_loss(config, torch.device("cuda")),
        no_triton=None,
    )


@dataclass(frozen=True)
class Demand:
    """What a run needs on one device of a machine, whatever the number of tokens at once."""

    config: Config
    machine: Machine
    dtype: torch.dtype
    state: ModelState
    gradient_bytes: int
    stack_entries: int  # of the largest stack that Newton-Schulz gets at once

    @classmethod
    def of(cls, config: Config, machine: Machine) -> Demand:
        dtype = precision_of(config, machine)
        model = meta_model(config, dtype)
        specs = matrix_specs(model, config)
        return cls(
            config,
            machine,
            dtype,
            model_state(model, config, machine.world_size),
            total_bytes(model.parameters()),
            largest_stack(specs, machine.world_size),
        )

    def memory(self, batch: BatchConfig | None = None, tokens: int | None = None) -> Memory:
        """With another split of the step, or with any number of tokens at once."""
        config = self.config if batch is None else replace(self.config, batch=batch)
        shape = step_shape(config, self.machine)
        if tokens is not None:
            shape = replace(shape, tokens=tokens)
        loss = loss_of(config, self.machine, shape.tokens, self.dtype)
        return step_memory(config, self.state, self.gradient_bytes, shape, loss, self.stack_entries)

    def fits(self, batch: BatchConfig | None = None, tokens: int | None = None) -> bool:
        return self.memory(batch, tokens).peak_bytes <= self.machine.usable_bytes

    def most_tokens(self) -> int:
        """That fit into memory at once: a multiple of the mask's block, or of GPT-2's sequence."""
        is_gpt2 = self.config.model.architecture == "gpt2"
        unit = self.config.batch.sequence_tokens if is_gpt2 else self.config.attention.block_size
        return unit * bisect_left(
            range(1, MOST_TOKENS // unit + 1), True, key=lambda units: not self.fits(tokens=units * unit)
        )

    def largest_split(self) -> BatchConfig | None:
        """The split of the step with the most tokens at once that fits and that the ranks divide."""
        return next(filter(self.fits, splits(self.config, self.machine.world_size)), None)


def step_shape(config: Config, machine: Machine) -> StepShape:
    batch, world_size = config.batch, machine.world_size
    per_rank = max(1, batch.tokens_per_step // batch.sequence_tokens // world_size)
    return StepShape(
        tokens=min(batch.micro_sequences, per_rank) * batch.sequence_tokens,
        micro_batches=-(-per_rank // batch.micro_sequences),
        element_bytes=precision_of(config, machine).itemsize,
        world_size=world_size,
        graphs=None if machine.device == "cpu" else graphs_of(config, world_size),
    )


def graphs_of(config: Config, world_size: int) -> Graphs:
    """What the compiler sees at once. An uncompiled model, which nothing here describes, counts as parts."""
    cuda = torch.device("cuda")
    mode = choose_mode(config, cuda, torch.bfloat16, 1, Installed(()), world_size).mode
    return "model" if mode == "model" else "parts"


def largest_stack(specs: list[MatrixSpec], world_size: int) -> int:
    """Entries of the largest stack that a rank orthogonalizes at once."""
    stacks = (
        len(stack) * chunk.entries
        for chunk in plan_chunks(specs, world_size)
        for rank in set(chunk.owners)
        for stack in chunk.stacks_of(rank)
    )
    return max(stacks, default=0)


def splits(config: Config, world_size: int) -> Iterator[BatchConfig]:
    """All splits of a step into sequences and micro-batches that the ranks divide, the largest first.

    The records' model packs documents into one sequence of any length. GPT-2 has a context of its own, so
    that only the number of sequences per micro-batch can change.
    """
    batch = config.batch
    if config.model.architecture == "gpt2":
        sequences = batch.tokens_per_step // batch.sequence_tokens
        for micro in range(sequences // world_size, 0, -1):
            if sequences % (micro * world_size) == 0:
                yield replace(batch, micro_sequences=micro)
        return
    unit = config.attention.block_size
    if config.data.order == "shuffled":
        unit = math.lcm(unit, config.data.chunk_tokens)
    per_rank, rest = divmod(batch.tokens_per_step, world_size)
    for count in range(1, per_rank // unit + 1):
        if not rest and per_rank % (count * unit) == 0:
            yield replace(batch, sequence_tokens=per_rank // count, micro_sequences=1)


def divides(config: Config, world_size: int) -> bool:
    """Whether every rank gets the same number of whole sequences, without which a run is refused."""
    try:
        check_ranks(config, world_size)
    except ConfigError:
        return False
    return True


def nearest_step(batch: BatchConfig, world_size: int) -> dict[str, int]:
    """The number of tokens per step closest to the given one that gives each rank whole sequences."""
    sequences = batch.tokens_per_step // batch.sequence_tokens
    per_rank = max(1, round(sequences / world_size))
    return {"batch.tokens_per_step": per_rank * world_size * batch.sequence_tokens}


def changes(before: BatchConfig, after: BatchConfig) -> dict[str, int]:
    """The settings that differ, by full name."""
    names = ("sequence_tokens", "micro_sequences")
    return {
        f"batch.{name}": getattr(after, name)
        for name in names
        if getattr(after, name) != getattr(before, name)
    }


def options(changes: Mapping[str, object]) -> str:
    """As on the command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())


def warnings_of(demand: Demand, split: BatchConfig | None, kernels: KernelFit | None) -> list[str]:
    """What would stop the run or make it fail, each with what to change. `split` is one that fits."""
    config, machine = demand.config, demand.machine
    found = []
    other = "" if split is None else f"use {options(changes(config.batch, split))}, the same tokens per step"
    if not divides(config, machine.world_size):
        advice = other or f"use {options(nearest_step(config.batch, machine.world_size))}, or fewer processes"
        found.append(f"{machine.world_size} processes do not divide the sequences of a step; {advice}")
    needed = demand.memory().peak_bytes
    if needed > machine.usable_bytes:
        mib = f"{needed / MIB:,.0f} MiB needed, {machine.usable_bytes / MIB:,.0f} usable"
        advice = other or "no split of the step fits: use a larger GPU or a smaller --size"
        found.append(f"too little memory: {mib}; {advice}")
    if kernels is not None and kernels.fits is False:
        found.append(f"attention's kernels need too much shared memory; {kernels.advice}")
    if not describes(demand):
        found.append("the model runs as plain PyTorch here, which takes more memory than this plan says")
    return found


def describes(demand: Demand) -> bool:
    """Whether the lists of activations are those of the code that would run."""
    config = demand.config
    if demand.machine.device == "cuda":
        return config.runtime.compile not in ("off", "block")
    return config.model.architecture != "gpt2" and demand.dtype == torch.float32
