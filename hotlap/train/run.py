"""A run from its configuration to its summary: process group, data, run directory, training.

Every rank runs the same code; only the main rank prints and writes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from hotlap.code_identity import code_identity
from hotlap.config import Config, EvaluationConfig
from hotlap.corpus.configured import data_directory, ensure_data
from hotlap.distributed.process_group import Distributed, process_group, read_environment
from hotlap.distributed.signals import StopRequest
from hotlap.errors import CheckpointError, ConfigError, DeviceError, DivergenceError, HotlapError
from hotlap.files import without_home
from hotlap.hardware import select_device, tune_malloc, usable_cores, use_expandable_segments
from hotlap.progress import silent
from hotlap.recipes import IdeaFile
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.runs.recorder import MainRecorder, Recorder
from hotlap.runs.trackers import Trackers, check_trackers
from hotlap.settings import to_json
from hotlap.train.clock import Clock, clock_for
from hotlap.train.environment import describe_environment
from hotlap.train.evaluation import reaches_target
from hotlap.train.flops import (
    flops_per_token,
    peak_memory_mib,
    peak_reserved_mib,
    peak_rss_mib,
)
from hotlap.train.header import header_lines, print_header
from hotlap.train.idea_difference import described, difference_table
from hotlap.train.ideas import Ideas
from hotlap.train.lap import Lap, build_lap
from hotlap.train.loop import Trainer
from hotlap.train.pace import Pace
from hotlap.train.snapshot import Snapshots, TrainingProgress, fingerprint_of, restore
from hotlap.train.start import check_same_start
from hotlap.train.trend import Trend


@dataclass(frozen=True)
class RunOptions:
    """What a run needs besides its configuration."""

    root: Path  # the directory that contains the runs
    name: str | None  # of the run; None: recipe, size and a number
    resume_from: store.Checkpoint | None = None
    # The step of the run's newest checkpoint when it was read; None: resume even if there are newer ones.
    newest_step: int | None = None
    trackers: list[str] = field(default_factory=list)
    starts_over: bool = False  # the run exists, but its last process left no checkpoint
    verbose: bool = False  # print the optimizer of every parameter
    ideas: tuple[IdeaFile, ...] = ()
    began: float | None = None  # when the command was given, as `time.time()`; None: when the run is


@dataclass(frozen=True)
class Result:
    status: str  # finished, target, patience or interrupted
    summary: dict[str, Any]
    lap: Lap
    directory: RunDirectory | None  # on the main rank only
    exit_code: int  # of an interrupted run: by Ctrl-C, or to be started again


def run(config: Config, options: RunOptions, console: Console) -> Result:
    """Train until the run ends, on every rank."""
    device = select_device(config.runtime.device)
    place = read_environment(device.type, os.environ)
    check_ranks(config, place.world_size)
    check_reduction(config, device, place.world_size)
    check_trackers(options.trackers)
    set_up_process(config, place)
    with ExitStack() as stack:
        timeout = timedelta(minutes=config.runtime.timeout_minutes)
        distributed = stack.enter_context(process_group(device.type, timeout))
        open_device(distributed.device)
        clock = clock_for(distributed.device)
        if options.began is not None:
            clock.go_on_from({"setup": max(0.0, time.time() - options.began)})
        # One rank per node prepares the data. The others wait only as long as for any collective, so a corpus
        # that takes longer has to be prepared before.
        directory = data_directory(config)
        if distributed.local_rank == 0:
            ensure_data(config, console.print if distributed.is_main else silent)
        if dist.is_initialized():
            dist.barrier()
        lap = build_lap(config, directory, distributed, clock, Ideas(options.ideas))
        stack.callback(lap.data.loader.close)
        if lap.workers is not None:
            stack.callback(lap.workers.close)
        progress = restore(lap, options.resume_from) if options.resume_from else TrainingProgress()
        check_same_start(lap, progress)
        clock.go_on_from({**progress.other_s, "training": progress.training_s})
        run_directory = None
        if distributed.is_main:
            run_directory = stack.enter_context(open_directory(config, progress, options))
        recorder = stack.enter_context(open_recorder(lap, progress, run_directory, options, console))
        snapshots = Snapshots(run_directory, config.checkpoint, progress)
        # Not earlier: before there is a run to save, Ctrl-C should end the process at once.
        stop = stack.enter_context(StopRequest())
        keeps_pace = config.schedule.minutes > 0 and options.resume_from is None
        pace = Pace(config.schedule.minutes, clock, progress.step) if keeps_pace else None
        try:
            with lap.ideas.blamed():
                status = Trainer(lap, progress, clock, recorder, snapshots, stop, pace).run()
        except DivergenceError:
            conclude(lap, progress, clock, "diverged", run_directory)
            raise
        summary = conclude(lap, progress, clock, status, run_directory)
        if dist.is_initialized():
            dist.barrier()
        return Result(status, summary, lap, run_directory, stop.exit_code)


def check_ranks(config: Config, world_size: int) -> None:
    """Refuse a world size with which the ranks would not get the same number of whole sequences."""
    sequences = config.batch.tokens_per_step // config.batch.sequence_tokens
    if sequences % world_size:
        raise ConfigError(
            expected=f"a number of processes that divides the {sequences} sequences of a step",
            found=f"{world_size} processes",
            do=f"use one of {[n for n in range(1, sequences + 1) if sequences % n == 0]},"
            " or change batch.tokens_per_step or batch.sequence_tokens",
        )


def check_reduction(config: Config, device: torch.device, world_size: int) -> None:
    """Refuse a fixed reduction where sums would depend on the number of ranks after all."""
    if config.runtime.reduction != "fixed":
        return
    if device.type != "cpu":
        raise DeviceError(
            expected="device cpu for runtime.reduction fixed",
            found=f"{device.type}, whose sums are not known to be the same bits each time",
            do="add --device cpu, or leave out --reduction",
        )
    if world_size & (world_size - 1):
        raise ConfigError(
            expected="1, 2, 4 or another power of two of processes for runtime.reduction fixed",
            found=f"{world_size} processes",
            do="use one of these, or leave out --reduction",
        )


def set_up_process(config: Config, place: Distributed) -> None:
    if place.device.type == "cuda":
        use_expandable_segments()
        torch.backends.cuda.matmul.allow_tf32 = True
        return
    tune_malloc()
    torch.set_num_threads(config.runtime.threads or max(1, usable_cores() // place.local_world_size))


def open_device(device: torch.device) -> None:
    """Open the CUDA context and start autograd's device thread before the first timed step."""
    if device.type == "cuda":
        torch.autograd.backward(torch.empty(1, device=device, requires_grad=True))


@contextmanager
def open_directory(config: Config, progress: TrainingProgress, options: RunOptions) -> Iterator[RunDirectory]:
    """The directory of the run, locked: a new one, or an existing one rewound to the checkpoint."""
    if options.resume_from is not None:
        assert options.name is not None, "a run to resume has a name"
        run_directory = RunDirectory.open(options.root / options.name)
    elif options.name is not None and options.starts_over:
        run_directory = RunDirectory.start_over(options.root / options.name)
    elif options.name is not None:
        run_directory = RunDirectory.create(options.root, options.name)
    else:
        run_directory = RunDirectory.create_numbered(options.root, f"{config.recipe}-{config.size}")
    with run_directory:
        if options.starts_over:
            run_directory.lock()
            run_directory.rewind(0, -1)
        elif options.resume_from is not None:
            run_directory.lock()
            check_newest(run_directory, options.newest_step)
            run_directory.rewound(progress.step, progress.evaluated_step)  # refuses a damaged run as it is
            # In this order, a process killed in between leaves no checkpoint that is ahead of its metrics.
            store.discard_after(run_directory.checkpoints, progress.step)
            run_directory.rewind(progress.step, progress.evaluated_step)
        try:
            run_directory.write_ideas({file.copy_name: file.source for file in options.ideas})
            run_directory.write_config(config)
        except HotlapError:
            if options.resume_from is None and not options.starts_over:
                shutil.rmtree(run_directory.path)  # its name is free again
            raise
        yield run_directory


def check_newest(run_directory: RunDirectory, seen: int | None) -> None:
    """Refuse if another process has trained the run further before this one locked it."""
    newest = max(store.stored(run_directory.checkpoints), default=None)
    if seen is not None and newest != seen:
        raise CheckpointError(
            expected=f"step {seen} as the newest checkpoint of {run_directory.path}, as when it was read",
            found=f"step {newest}, of a process that resumed the run in the meantime",
            do="resume again",
        )


def open_recorder(
    lap: Lap,
    progress: TrainingProgress,
    run_directory: RunDirectory | None,
    options: RunOptions,
    console: Console,
) -> Recorder:
    """Print and write the header of the run. Ranks without a directory get a silent recorder."""
    if run_directory is None:
        return Recorder()
    run_directory.write_environment(full_environment(lap))
    if lap.data.tokenizer is not None:
        lap.data.tokenizer.save(run_directory.path)
    lines = header_lines(lap, progress, run_directory.path)
    for line in lines:
        run_directory.append_log(without_home(line))
    print_header(lines, console)
    for file in lap.ideas.files:
        console.print(difference_table(file, lap.config.size))
    if options.verbose:
        console.print(lap.routing.table())
    for note in lap.routing.notes():
        console.print(note, markup=False, soft_wrap=True)
    if progress.step:
        resumed = {"kind": "resume", "step": progress.step, "world_size": lap.distributed.world_size}
        run_directory.append_metrics(resumed)
    steps = lap.config.schedule.steps
    trackers = Trackers()
    recorder = MainRecorder(run_directory, console, steps, progress.step, trackers)
    recorded = run_directory.read_metrics().lines if options.trackers else []
    for name in dict.fromkeys(options.trackers):
        recorder.complained(trackers.open(name, run_directory.path, to_json(lap.config), recorded))
    return recorder


def full_environment(lap: Lap) -> dict[str, Any]:
    manifest = lap.data.train.manifest
    return {
        **describe_environment(
            device=lap.distributed.device,
            precision=lap.dtype,
            attention_backend=lap.backend.name,
            kernels=lap.installed.as_json(),
            compile_mode=lap.compiled.mode,
            world_size=lap.distributed.world_size,
            threads=lap.threads,
        ),
        "code": code_identity(lap.config.ideas),
        "ideas": [described(file, lap.config.size) for file in lap.ideas.files],
        "peak_gflops": lap.peak_gflops,
        "data": {
            "source": lap.config.data.source,
            "directory": without_home(str(lap.data.directory.resolve())),
            "fingerprint": lap.data.train.fingerprint,
            "val_fingerprint": fingerprint_of(lap.data.val),
            "train_tokens": len(lap.data.train),
            "val_tokens": lap.data.validation.tokens if lap.data.validation else 0,
            "val_bytes": lap.data.val.text_bytes if lap.data.val else None,
            "tokenizer": manifest.tokenizer.name if manifest else None,
        },
        "model": {
            "parameters": sum(p.numel() for p in lap.model.parameters()),
            "flops_per_token": counted_flops(lap, lap.config.schedule.steps),
        },
        "routing": lap.routing.rows(),
    }


def counted_flops(lap: Lap, steps: int) -> float | None:
    """FLOPs per token of training; None if modules of an idea compute what nobody has counted."""
    return None if lap.ideas.idea.modules else flops_per_token(lap.config, steps)


def conclude(
    lap: Lap, progress: TrainingProgress, clock: Clock, status: str, run_directory: RunDirectory | None
) -> dict[str, Any]:
    """Make the summary, which tells how the run ended; the main rank writes it."""
    clock.switch("setup")
    summary = summarize(lap, progress, clock, status)
    if run_directory is not None:
        summary["target"] = describe_target(lap.config.evaluation, run_directory.read_metrics().lines)
        run_directory.write_summary(summary)
    return summary


def summarize(lap: Lap, progress: TrainingProgress, clock: Clock, status: str) -> dict[str, Any]:
    seconds = {**clock.seconds, "training": progress.training_s}
    tokens_per_s = progress.tokens / progress.training_s if progress.training_s else 0.0
    peak = lap.peak_gflops
    flops = counted_flops(lap, progress.step) if progress.step else 0.0
    evaluation = progress.evaluation
    return {
        "status": status,
        "steps": progress.step,
        "tokens": progress.tokens,
        "val_loss": evaluation.loss if evaluation else None,
        "val_bpb": evaluation.bpb if evaluation else None,
        "val_tokens": lap.data.validation.tokens if lap.data.validation else 0,
        "best": describe_best(progress.trend),
        "seconds": {**seconds, "total": sum(seconds.values())},
        "tokens_per_s": tokens_per_s,
        "peak_fraction": tokens_per_s * flops / (peak * 1e9 * lap.distributed.world_size)
        if peak and flops is not None
        else None,
        "peak_memory_mib": peak_memory_mib(lap.distributed.device),
        "peak_reserved_mib": peak_reserved_mib(lap.distributed.device),
        "peak_rss_mib": peak_rss_mib(),
        "nan_steps": progress.nan_steps,
        "tokens_dropped": lap.data.loader.tokens_dropped,
        "epochs": lap.data.loader.state.epoch,
    }


def describe_best(trend: Trend) -> dict[str, Any] | None:
    """The best validation, on the tokens that all validations evaluate; None if none was finite."""
    if trend.best_step < 0:
        return None
    return {"step": trend.best_step, "loss": trend.best_loss, "bpb": trend.best_bpb}


def describe_target(settings: EvaluationConfig, metrics: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The target and the first validation that reached it, in any process of the run."""
    if settings.target_loss is None and settings.target_bpb is None:
        return None
    kind = "loss" if settings.target_loss is not None else "bpb"
    validations = [line for line in metrics if line["kind"] == "validation" and line["val_loss"] is not None]
    at_target = [line for line in validations if reaches_target(line["val_loss"], line["val_bpb"], settings)]
    return {
        "kind": kind,
        "value": settings.target_loss if kind == "loss" else settings.target_bpb,
        "reached": bool(at_target),
        **{name: at_target[0][name] if at_target else None for name in ("train_s", "tokens", "step")},
    }
