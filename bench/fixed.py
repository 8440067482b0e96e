"""What does it cost that a run's bits do not depend on ranks and threads (`runtime.reduction = fixed`)?

    python -m bench.fixed [--steps 60]

Whole training steps of `softcap`, with and without the fixed reduction, in the same processes and in turn, so
that a busy moment meets both: medians. Two cores as two threads of one rank, and as two ranks. The last rows
have one sequence per step, as `nano` by default, for which the fixed reduction uses one thread.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from hotlap.config import Config
from hotlap.distributed.process_group import Distributed
from hotlap.distributed.signals import StopRequest
from hotlap.hardware import has_native_bf16, torch_threads, tune_malloc
from hotlap.recipes import resolve
from hotlap.runs.recorder import Recorder
from hotlap.settings import updated
from hotlap.train.clock import Clock
from hotlap.train.lap import build_lap
from hotlap.train.loop import Trainer
from hotlap.train.run import data_directory, ensure_data
from hotlap.train.snapshot import Snapshots, TrainingProgress
from tests.ranks import run_ranks

CPU = torch.device("cpu")
WARMUP_STEPS = 5
REDUCTIONS = ("averaged", "fixed")


class Row(NamedTuple):
    size: str
    sequence_tokens: int
    precision: str
    ranks: int
    threads: int

    @property
    def config(self) -> Config:
        changes = {"runtime.precision": self.precision, "batch.sequence_tokens": self.sequence_tokens}
        return updated(resolve("softcap", self.size), {**changes, "evaluation.tokens": 1024})


def medians_ms(rank: int, world_size: int, row: Row, directory: Path, steps: int) -> list[float]:
    """Per reduction, of a step."""
    tune_malloc()
    place = Distributed(rank, rank, world_size, world_size, CPU, has_group=world_size > 1)
    trainers, threads = [], []
    for reduction in REDUCTIONS:
        torch.set_num_threads(row.threads)
        lap = build_lap(updated(row.config, {"runtime.reduction": reduction}), directory, place, Clock())
        progress = TrainingProgress()
        snapshots = Snapshots(None, row.config.checkpoint, progress)
        trainers.append(Trainer(lap, progress, Clock(), Recorder(), snapshots, StopRequest()))
        threads.append(torch.get_num_threads())
    seconds: list[list[float]] = [[] for _ in REDUCTIONS]
    for _ in range(WARMUP_STEPS + steps):
        for trainer, count, of_trainer in zip(trainers, threads, seconds, strict=True):
            with torch_threads(count):
                dist.barrier()
                start = time.perf_counter()
                trainer.update()
                of_trainer.append(time.perf_counter() - start)
    return [1e3 * statistics.median(of_trainer[WARMUP_STEPS:]) for of_trainer in seconds]


def rows() -> list[Row]:
    precisions = ["float32", *(["bfloat16"] if has_native_bf16(CPU) else [])]
    shapes = [("pico", 512), ("nano", 512), ("nano", 2048)]
    return [
        Row(size, sequence_tokens, precision, ranks, 2 // ranks)
        for size, sequence_tokens in shapes
        for precision in precisions
        for ranks in ((1, 2) if sequence_tokens == 512 else (1,))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    print("| size | sequences | precision | ranks × threads | averaged, ms | fixed, ms | more |")
    print("|---|---|---|---|---|---|---|")
    for row in rows():
        ensure_data(row.config, print)
        arguments = (row, data_directory(row.config), steps)
        averaged, fixed = run_ranks(medians_ms, row.ranks, *arguments, timeout_seconds=300)[0]
        print(
            f"| {row.size} | {2048 // row.sequence_tokens} × {row.sequence_tokens} | {row.precision} |"
            f" {row.ranks} × {row.threads} | {averaged:.1f} | {fixed:.1f} | {fixed / averaged - 1:+.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
