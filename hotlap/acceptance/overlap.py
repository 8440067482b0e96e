"""How much of the reduction of gradients is hidden behind the backward that computes them, from a trace.

    python -m hotlap.acceptance.overlap DEVICE SIZE DATA RESULT

is what each of two ranks runs, started by torchrun; the first one writes its `Reductions` to RESULT as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hotlap.acceptance.curve import RECIPE, SEQUENCE_TOKENS, environment, last_line, settings
from hotlap.distributed.process_group import process_group
from hotlap.errors import TrainingError
from hotlap.json_files import write_json
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.clock import Clock
from hotlap.train.lap import build_lap

RANKS = 2
Interval = tuple[float, float]  # start and end


class Reductions(NamedTuple):
    number: int
    hidden_share: float  # of their time, during which gradients were still computed


def measure_reductions(device: torch.device, size: str, data: Path, scratch: Path) -> Reductions:
    """Of one backward on two ranks of this machine."""
    result = scratch / "reductions.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
        # Without a host name that has to resolve.
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *("-m", __name__, device.type, size, str(data), str(result)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise TrainingError(
            expected="two ranks that end well",
            found=f"exit code {done.returncode}: {last_line(done.stderr or done.stdout)}",
            do="run `hotlap train --procs 2` and see what it says",
        )
    return Reductions(**json.loads(result.read_text(encoding="utf-8")))


def traced(backward: Callable[[], None], device: torch.device) -> Reductions:
    """The reductions of a backward of DDP's module, which must not be among its first two."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiled:
        backward()
        if on_cuda:
            torch.cuda.synchronize(device)
    events = profiled.events() or []
    reductions, computations = kernels(events) if on_cuda else gloo_and_autograd(events)
    total = sum(end - start for start, end in merged(reductions))
    return Reductions(len(reductions), overlap(reductions, computations) / total if total else 0.0)


def kernels(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Of NCCL and of everything else on the GPU, without the annotations that a trace shows there too."""
    found: tuple[list[Interval], list[Interval]] = ([], [])
    for event in events:
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            found["nccl" not in event.name.lower()].append(interval(event))
    return found


def gloo_and_autograd(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    events = list(events)
    return (
        [interval(event) for event in events if event.name == "gloo:all_reduce"],
        [
            interval(event)
            for event in events
            if event.name.startswith("autograd::engine::evaluate_function")
            and not event.name.endswith("AccumulateGrad")
        ],
    )


def interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, each once, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def overlap(one: Iterable[Interval], other: Iterable[Interval]) -> float:
    """How long both go on at once."""
    others = merged(other)
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in merged(one)
        for other_start, other_end in others
    )


def main(device: str, size: str, data: str, result: str) -> None:
    """A rank. The first backward lets DDP order its buckets, the second is the first in that order."""
    config = updated(resolve(RECIPE, size), settings(size, Path(data)) | {"runtime.device": device})
    with process_group(device) as distributed:
        lap = build_lap(config, Path(data), distributed, Clock())
        tokens = torch.zeros(SEQUENCE_TOKENS, dtype=torch.int32, device=distributed.device)

        def backward() -> None:
            lap.module(tokens, tokens.long(), SEQUENCE_TOKENS).backward()

        for _ in range(2):
            backward()
        found = traced(backward, distributed.device)
        lap.data.loader.close()
        if distributed.is_main:
            write_json(Path(result), found._asdict(), TrainingError)


if __name__ == "__main__":
    main(*sys.argv[1:])
