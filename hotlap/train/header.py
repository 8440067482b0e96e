"""The header that a run prints before its first step: choices that would otherwise be silent.

At 80 columns it leaves room for the first lines of the training on a terminal of 24.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from rich.console import Console

from hotlap import __version__
from hotlap.config import Config
from hotlap.data.validation import BLOCK_TOKENS
from hotlap.hardware import AMX_FAULTS, amx_faults, device_name
from hotlap.train.idea_difference import idea_lines
from hotlap.train.lap import Data, Lap
from hotlap.train.snapshot import TrainingProgress


def described_precision(lap: Lap) -> str:
    """The dtype of the activations, with the reason if faulty AMX hardware decided it."""
    activations = f"{str(lap.dtype).removeprefix('torch.')} activations"
    if lap.config.runtime.precision == "auto" and amx_faults(lap.distributed.device):
        return f"{activations} (the processor {AMX_FAULTS})"
    return activations


def described_sequences(config: Config) -> str:
    """The length of validation sequences, if it differs from that of training sequences."""
    tokens = config.validation_sequence_tokens
    return f" in sequences of {tokens:,}" if tokens != config.batch.sequence_tokens else ""


def described_validation(config: Config, data: Data) -> str:
    if data.val is None:
        return "none: the data has no validation split; losses are of training text only"
    if data.validation is None or data.validation_parts is None:
        return f"none: the split has {len(data.val):,} tokens, not more than a block of {BLOCK_TOKENS}"
    parts = data.validation_parts
    on_the_way = f" {parts.common.tokens:,} of them before the end," if parts.rest.tokens else ""
    bytes_per_token = f"{data.bytes_per_token:.3f}" if data.bytes_per_token else "unknown"
    return (
        f"{data.validation.tokens:,} tokens{described_sequences(config)},{on_the_way}"
        f" {data.validation.tokens_left_out:,} left out; bytes per token {bytes_per_token}"
    )


def described_epochs(lap: Lap) -> str:
    epochs = lap.epochs(lap.config.schedule.steps)
    return f"{epochs:.2f} epochs" if epochs < 10 else f"{epochs:,.0f} epochs"


def print_header(lines: list[str], console: Console) -> None:
    """On a terminal, long lines go on below where their text begins."""
    for line in lines:
        if console.is_terminal:
            indent = " " * 11
            line = textwrap.fill(
                line,
                console.width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        console.print(line, markup=False, soft_wrap=True)


def header_lines(lap: Lap, progress: TrainingProgress, directory: Path) -> list[str]:
    config, data, world = lap.config, lap.data, lap.distributed
    sequences = config.batch.tokens_per_step // config.batch.sequence_tokens // world.world_size
    micro_batches = -(-sequences // config.batch.micro_sequences)
    peak = f"{lap.peak_gflops:,.0f} GFLOP/s" if lap.peak_gflops else "unknown"
    lines = [
        f"hotlap {__version__}: {config.recipe} at {config.size}, seed {config.seed}, into {directory}",
        f"device     {world.world_size} × {world.device.type} ({device_name(world.device)}),"
        f" {lap.threads} threads each, matmul peak {peak}",
        f"precision  {described_precision(lap)}, float32 weights; embeddings"
        f" {str(next(lap.model.embed.parameters()).dtype).removeprefix('torch.')}",
        f"attention  {lap.backend.name} backend; compile {lap.compiled.mode} ({lap.compiled.reason})",
        f"kernels    {lap.installed}",
        f"model      {sum(p.numel() for p in lap.model.parameters()):,} parameters,"
        f" {config.model.num_layers} × {config.model.width}, {config.model.num_heads} heads",
        f"batch      {config.batch.tokens_per_step:,} tokens per step: {world.world_size} ranks ×"
        f" {micro_batches} micro-batches; {config.schedule.steps} steps, {described_epochs(lap)}",
        f"data       {data.directory}: {len(data.train):,} training tokens, order {config.data.order},"
        f" {data.loader.tokens_dropped_per_epoch:,} dropped per epoch",
        f"validation {described_validation(config, data)}",
        f"checkpoint {config.checkpoint.describe(world.world_size)}",
        f"optimizers {lap.routing.summary()} (--verbose lists them)",
    ]
    if config.schedule.minutes and not progress.step:
        lines.insert(
            7,
            f"pace       ends after {60 * config.schedule.minutes:g} s, set-up included: the number of steps"
            " is planned again on the way",
        )
    lines[1:1] = [line for file in lap.ideas.files for line in idea_lines(file)]
    if lap.workers is not None:
        at_once = min(sequences, lap.workers.count)
        lines.append(
            f"reduction  fixed: the same bits on 1, 2, 4, … ranks and any number of threads; {at_once} of a"
            f" rank's {sequences} sequences at a time, each on one thread"
        )
    if progress.step:
        lines.append(f"resumed    at step {progress.step}, {progress.training_s:.1f} s of training done")
    return lines
