"""A lap: the data, model, optimizers and backend of a run, built from its configuration.

The code is the same for one process and for many. Every rank builds the same model and opens the
same data; with several ranks the model is also wrapped in DistributedDataParallel.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotlap import kernels
from hotlap.attention import Backend
from hotlap.config import Config
from hotlap.corpus.tokenizer import Tokenizer, load_tokenizer
from hotlap.data.loader import Loader
from hotlap.data.manifest import read_manifest
from hotlap.data.stream import TokenStream, open_split
from hotlap.data.validation import BLOCK_TOKENS, ValidationBatches, validation_batches
from hotlap.distributed.process_group import Distributed, broadcast_from_main
from hotlap.errors import DataError
from hotlap.hardware import select_precision, torch_threads
from hotlap.model import GPT, GPT2
from hotlap.model.roles import parameter_roles
from hotlap.optim.muon import Muon
from hotlap.optim.muon_math import OneByOne
from hotlap.optim.routing import RoutedParameter, Routing, build_optimizers, route
from hotlap.optim.schedules import lr_multiplier
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.clock import Clock
from hotlap.train.compile import (
    CompileChoice,
    apply_compile,
    choose_mode,
    compiles_loss,
    compiles_optimizers,
    max_micro_batch_tokens,
    tunes_kernels,
    warm_up,
    warm_up_muon,
)
from hotlap.train.evaluation import ValidationParts, split_validation
from hotlap.train.flops import peak_gflops
from hotlap.train.ideas import NO_IDEAS, Ideas
from hotlap.train.masking import Masking
from hotlap.train.workers import Workers

GPT2_END_OF_TEXT = 50256
MIN_BUCKET_MIB, MAX_BUCKET_MIB = 1, 25


@dataclass
class Lap:
    config: Config
    ideas: Ideas
    distributed: Distributed
    data: Data
    dtype: torch.dtype
    backend: Backend
    model: GPT | GPT2
    masking: Masking
    batch_loss: BatchLoss
    module: nn.Module  # `batch_loss`, wrapped in DDP if it averages the gradients of several ranks
    routing: Routing
    optimizers: list[torch.optim.Optimizer]
    installed: kernels.Installed
    compiled: CompileChoice
    peak_gflops: float | None
    threads: int
    workers: Workers | None  # that compute in these threads if the reduction is fixed

    def epochs(self, steps: int) -> float:
        """How often the training tokens are seen in so many steps."""
        return steps * self.config.batch.tokens_per_step / self.data.loader.tokens_per_epoch

    def lr_multiplier(self, step: int) -> float:
        """The factor on every learning rate for the update at `step`."""
        own = self.ideas.idea.schedule
        schedule = self.config.schedule
        return lr_multiplier(step, schedule) if own is None else float(own(step, schedule.steps))


@dataclass
class Data:
    directory: Path
    train: TokenStream
    val: TokenStream | None  # None if the data has no validation split
    loader: Loader
    validation: ValidationBatches | None  # None also if the split is shorter than a block
    validation_parts: ValidationParts | None
    end_of_text: int
    bytes_per_token: float | None  # of the validation split
    tokenizer: Tokenizer | None  # None if the data has none


def build_lap(
    config: Config, directory: Path, distributed: Distributed, clock: Clock, ideas: Ideas = NO_IDEAS
) -> Lap:
    device = distributed.device
    threads, workers = torch.get_num_threads(), None
    if config.runtime.reduction == "fixed":
        workers = Workers(threads)
        torch.set_num_threads(1)
    dtype = select_precision(config.runtime.precision, device)
    backend = kernels.choose_backend(
        backend_name(config, device), device, saved_bytes=saved_bytes_per_layer(config)
    )
    data = open_data(config, directory, distributed)
    torch.manual_seed(config.seed)
    with device:
        model = ideas.build_model(config, packed_tokens(config), dtype)
    masking = Masking(config, backend, data.end_of_text, device)
    ideas.check_roles(model)
    routing = route_parameters(model, config, distributed.world_size, ideas)
    # Newton-Schulz runs in the precision of the run: bfloat16 is faster where hardware supports it.
    optimizers = build_optimizers(routing, ns_dtype=dtype, check_finite=False)
    installed = kernels.install(
        model,
        optimizers,
        backend=backend,
        tokens=max_micro_batch_tokens(config, distributed.world_size),
        compiled=config.runtime.compile in ("block", "parts", "model"),
        compiles_loss=compiles_loss(config, device),
        compiles_optimizers=compiles_optimizers(config, device),
        switched_off=config.runtime.kernels == "off",
    )
    ideas.set_training_loss(model)
    if workers is not None:
        compute_one_by_one(optimizers, workers)
    with torch_threads(threads):
        peak = peak_gflops(device, dtype)
    all_threads = threads * distributed.world_size
    compiled = broadcast_from_main(
        choose_mode(config, device, dtype, all_threads, installed, distributed.world_size)
    )
    batch_loss = BatchLoss(model, masking)
    if compiled.mode != "off":
        with clock.phase("compile"):
            apply_compile(batch_loss, compiled.mode, coordinate_descent=tunes_kernels(config, device))
            with ideas.blamed():
                warm_up(batch_loss, config, distributed)
            if compiles_optimizers(config, device):
                warm_up_muon(optimizers)
    ideas.try_out(batch_loss, config, data.train)
    module: nn.Module = batch_loss
    if distributed.world_size > 1 and workers is None:
        module = wrap_ddp(batch_loss, device, bucket_size_mib(model.blocks))
    return Lap(
        config=config,
        ideas=ideas,
        distributed=distributed,
        data=data,
        dtype=dtype,
        backend=backend,
        model=model,
        masking=masking,
        batch_loss=batch_loss,
        module=module,
        routing=routing,
        optimizers=optimizers,
        installed=installed,
        compiled=compiled,
        peak_gflops=peak,
        threads=threads,
        workers=workers,
    )


def compute_one_by_one(optimizers: Sequence[torch.optim.Optimizer], workers: Workers) -> None:
    """Make Newton-Schulz independent of who computes a matrix, and beside what."""
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            optimizer.math = OneByOne(optimizer.math, workers.map)


def wrap_ddp(module: nn.Module, device: torch.device, bucket_mib: int) -> DistributedDataParallel:
    """Average the gradients over the ranks, a bucket at a time, while the backward computes the next ones."""
    # No sync: every rank computes the same buffers. Newer releases of torch renamed the option.
    known = inspect.signature(DistributedDataParallel).parameters
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    device_ids = [device] if device.type == "cuda" else None
    options: dict[str, Any] = {"gradient_as_bucket_view": True, sync_buffers: False}
    return DistributedDataParallel(module, device_ids=device_ids, bucket_cap_mb=bucket_mib, **options)


def bucket_size_mib(blocks: nn.ModuleList) -> int:
    """About the gradients of one block, so that they are reduced while the block before it computes its own.

    Never more than DDP's default, with which a link is busy, and never so little that its latency counts.
    """
    block_bytes = max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)
    return min(max(MIN_BUCKET_MIB, block_bytes // 2**20), MAX_BUCKET_MIB)


def packed_tokens(config: Config) -> int:
    """Maximum number of positions that the model needs.

    GPT-2's positions restart with every sequence.
    """
    if config.model.architecture == "gpt2":
        return config.batch.sequence_tokens
    training = config.batch.micro_sequences * config.batch.sequence_tokens
    return max(training, config.validation_sequence_tokens)


def backend_name(config: Config, device: torch.device) -> str:
    """The configured attention backend; without kernels, `auto` is the one in PyTorch on a CPU."""
    without_kernels = config.runtime.kernels == "off" and device.type == "cpu"
    asked = config.attention.backend
    return "blocked" if asked == "auto" and without_kernels else asked


def saved_bytes_per_layer(config: Config) -> int:
    """Bytes of attention probabilities that each layer may save for the backward pass."""
    layers = config.model.num_layers - len(config.model.attention_free_layers)
    return config.attention.saved_probabilities_mb * 2**20 // max(1, layers)


def route_parameters(model: GPT | GPT2, config: Config, world_size: int, ideas: Ideas = NO_IDEAS) -> Routing:
    parameters = dict(model.named_parameters())
    roles = parameter_roles(model, ideas.roles)
    return route(
        [RoutedParameter(name, parameters[name], role) for name, role in roles.items()],
        config.optim,
        world_size,
        model_parameters=parameters.items(),
        own=ideas.optimizers(parameters),
    )


def open_data(config: Config, directory: Path, distributed: Distributed) -> Data:
    vocab_size = config.model.vocab_size
    train = open_split(directory, "train", vocab_size=vocab_size)
    val = open_validation(directory, vocab_size)
    end_of_text = end_of_text_of(train, config.data.tokenizer)
    batch = config.batch
    loader = Loader(
        train,
        batch_tokens=batch.tokens_per_step,
        sequence_tokens=batch.sequence_tokens,
        rank=distributed.rank,
        world_size=distributed.world_size,
        tail=config.data.tail,
        order=config.data.order,
        chunk_tokens=config.data.chunk_tokens,
        seed=config.seed,
        device=distributed.device,
    )
    validation = None
    if val is not None and len(val) > BLOCK_TOKENS:
        validation = validation_batches(
            val,
            config.evaluation.tokens,
            config.validation_sequence_tokens,
            distributed.rank,
            distributed.world_size,
            device=distributed.device,
        )
    check_target(config, validation, directory)
    return Data(
        directory,
        train,
        val,
        loader,
        validation,
        split_validation(validation, config) if validation is not None else None,
        end_of_text,
        bytes_per_token(val, config.data.bytes_per_token) if val is not None else None,
        load_tokenizer(directory) if train.manifest and train.manifest.tokenizer.file else None,
    )


def open_validation(directory: Path, vocab_size: int) -> TokenStream | None:
    """The validation split, or None if the data was prepared without one."""
    manifest = read_manifest(directory)
    if manifest is not None and not manifest.of_split("val"):
        return None
    return open_split(directory, "val", vocab_size=vocab_size)


def check_target(config: Config, validation: ValidationBatches | None, directory: Path) -> None:
    settings = config.evaluation
    if validation is None and (settings.target_loss, settings.target_bpb) != (None, None):
        raise DataError(
            expected="a validation split, to tell when the run reaches its target",
            found=f"none in {directory}",
            do="train without a target, or prepare the data with --val-fraction",
        )


def end_of_text_of(stream: TokenStream, tokenizer: str) -> int:
    """The token that starts a document.

    Without a manifest it is known for the GPT-2 tokenizer only.
    """
    if stream.end_of_text is not None:
        return stream.end_of_text
    if tokenizer != "gpt2":
        raise DataError(
            expected="a manifest that names the end-of-text token",
            found=f"shards without a manifest in {stream.name}",
            do="prepare the data with `hotlap data prepare`, or use the GPT-2 tokenizer",
        )
    return GPT2_END_OF_TEXT


def bytes_per_token(val: TokenStream, given: float | None) -> float | None:
    """Bytes of text per predicted token: `given`, else from the manifest, else None."""
    if given is not None or val.text_bytes is None:
        return given
    return val.text_bytes / (len(val) - 1)
