"""Training steps at the batch of a size, measured: time, memory, waits, recompilations, the head's share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotlap.config import Config
from hotlap.distributed.process_group import Distributed
from hotlap.distributed.signals import StopRequest
from hotlap.model import GPT
from hotlap.model.head import cross_entropy
from hotlap.plan.fit import Demand
from hotlap.plan.machine import present_gpu
from hotlap.recipes import resolve
from hotlap.runs.recorder import Recorder
from hotlap.settings import updated
from hotlap.train.clock import Clock, wait_for
from hotlap.train.flops import flops_per_token, peak_memory_mib
from hotlap.train.lap import Lap, build_lap
from hotlap.train.loop import Trainer
from hotlap.train.snapshot import Snapshots, TrainingProgress

WARMUP_STEPS = 3
MEASURED_STEPS = 5
HEAD_REPEATS = 3


def measure_step(device: torch.device, size: str, data: Path) -> dict[str, Any]:
    """One process does all of a step's tokens, in the largest sequences that its memory has room for."""
    config = updated(
        resolve("softcap", size),
        {
            "data.source": str(data),
            "data.tokenizer": "gpt2",
            "data.order": "stream",
            "data.tail": "carry",
            "runtime.device": device.type,
            "evaluation.tokens": resolve("softcap", size).batch.sequence_tokens,
        },
    )
    planned_mib = None
    if device.type == "cuda":
        config, planned_mib = fitting(config, device)
    alone = Distributed(0, 0, 1, 1, device, has_group=False)
    lap = build_lap(config, data, alone, Clock())
    wait = wait_for(device)
    snapshots = Snapshots(None, config.checkpoint, TrainingProgress())
    trainer = Trainer(lap, TrainingProgress(), Clock(), Recorder(), snapshots, StopRequest())
    try:
        for _ in range(WARMUP_STEPS):
            trainer.update()
        wait()
        began = time.perf_counter()
        waits, recompiled = watched(device, trainer)
        wait()
        step_s = (time.perf_counter() - began) / MEASURED_STEPS
        memory_mib = peak_memory_mib(device)
        head_s = measure_head(lap, wait)
    finally:
        lap.data.loader.close()
    tokens = config.batch.tokens_per_step
    flops = flops_per_token(config, config.schedule.steps)
    return {
        "step_ms": step_s * 1e3,
        "tokens_per_s": tokens / step_s,
        "mfu": flops * tokens / step_s / (lap.peak_gflops * 1e9) if lap.peak_gflops else None,
        "peak_memory_mib": memory_mib,
        "planned_memory_mib": planned_mib,
        "head_share": head_s / step_s,
        "waits": waits,
        "recompiled": recompiled,
        "compile": lap.compiled.mode,
        "kernels": lap.installed.as_json(),
    }


def fitting(config: Config, device: torch.device) -> tuple[Config, float]:
    """The configuration with the largest sequences that fit, and the peak memory in MiB that is planned."""
    demand = Demand.of(config, present_gpu(device))
    split = config.batch if demand.fits() else demand.largest_split() or config.batch
    return replace(config, batch=split), demand.memory(split).peak_bytes / 2**20


def watched(device: torch.device, trainer: Trainer) -> tuple[str, str]:
    """Run the steps that are measured. Returns what waited for the device and what was recompiled."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(MEASURED_STEPS):
                trainer.update()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        return ("", reason) if "recompile" in reason else (reason, "")
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return "", ""


def measure_head(lap: Lap, wait: Callable[[], None]) -> float:
    """Seconds per step of the loss and its gradients alone."""
    model, batch = lap.config.model, lap.config.batch
    tokens = batch.micro_sequences * batch.sequence_tokens
    assert isinstance(lap.model, GPT), "the recipe that is measured has a head of its own"
    weight = lap.model.head.weight
    x = torch.randn((tokens, model.width), device=weight.device, dtype=lap.dtype, requires_grad=True)
    targets = torch.zeros(tokens, device=weight.device, dtype=torch.int64)
    # The plain loss is left to the compiler, here as in the step.
    loss = lap.model.loss
    measured = torch.compile(loss, dynamic=False) if loss is cross_entropy else loss
    seconds = []
    for _ in range(HEAD_REPEATS):
        wait()
        began = time.perf_counter()
        measured(x, weight, targets, model.softcap).backward()
        wait()
        seconds.append(time.perf_counter() - began)
    lap.model.zero_grad(set_to_none=True)
    return min(seconds) * batch.tokens_per_step / tokens
