"""How does the cost per token change with the sequence length, and with processes instead of threads?

    python -m bench.scaling [--threads 2]

Sequence length: forward and backward of `softcap` at `nano` with a fixed window. Each length runs in its own
process, to measure its peak memory. Processes: short runs of `hotlap train` at `nano`, once with one process
and several threads, once with several processes. Measurements are interleaved, so that other load affects
all of them, and the medians are reported.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench.step import install_kernels, make_model
from hotlap.hardware import tune_malloc
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.flops import peak_rss_mib

CPU = torch.device("cpu")
LENGTHS = (2048, 4096, 16_384, 65_536)
BASE_LENGTH = 4096
WINDOW_TOKENS = 512
TIMED_TOKENS = 16_384  # minimum per measurement
REPEATS = 3
RUN = (
    "train softcap --size nano --sequence-tokens 1024 --steps 25 --precision float32 --compile off"
    " --evaluation.every-steps 0 --evaluation.tokens 1024"
)

step: Callable[[], None]


class Sequences:
    """Forward and backward over sequences of one length, in a separate process."""

    def __init__(self, tokens: int, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.tokens = tokens
        self.pool = ProcessPoolExecutor(1, spawn, initializer=make_step, initargs=(tokens, threads))
        self.mib = self.pool.submit(step_mib).result()
        self.seconds: list[float] = []  # per token

    def measure(self) -> None:
        steps = max(1, TIMED_TOKENS // self.tokens)
        self.seconds.append(self.pool.submit(seconds_of, steps).result() / (steps * self.tokens))


def make_step(tokens: int, threads: int) -> None:
    """Set the global `step` of this process to a forward and backward over `tokens` tokens."""
    global step
    tune_malloc()
    torch.set_num_threads(threads)
    window = {"schedule.window_start_tokens": WINDOW_TOKENS, "schedule.window_end_tokens": WINDOW_TOKENS}
    lengths = {"batch.sequence_tokens": tokens, "batch.tokens_per_step": tokens}
    config = updated(resolve("softcap", "nano"), {**lengths, **window})
    model = make_model(config, torch.float32)
    masking = install_kernels(config, model)
    ids = torch.randint(1, config.model.vocab_size, (tokens + 1,))

    def step_of_this_length() -> None:
        model.zero_grad(set_to_none=True)
        model(ids[:-1], ids[1:], masking.plans(ids[:-1], None)).backward()

    step = step_of_this_length


def step_mib() -> float:
    """Memory of a step in MiB, without imports and model."""
    before = peak_rss_mib()
    step()
    return peak_rss_mib() - before


def seconds_of(steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start


def print_lengths(threads: int) -> None:
    measured = [Sequences(tokens, threads) for tokens in LENGTHS]
    for _ in range(REPEATS):
        for sequences in measured:
            sequences.measure()
    base = next(sequences for sequences in measured if sequences.tokens == BASE_LENGTH)
    print(f"| sequence tokens | µs per token | vs {BASE_LENGTH:,} | MiB | KiB per token |")
    print("|---|---|---|---|---|")
    for sequences in measured:
        sequences.pool.shutdown()
        ratio = statistics.median(
            here / there for here, there in zip(sequences.seconds, base.seconds, strict=True)
        )
        print(
            f"| {sequences.tokens:,} | {1e6 * statistics.median(sequences.seconds):.1f} | {ratio:.2f} |"
            f" {sequences.mib:.0f} | {sequences.mib * 1024 / sequences.tokens:.1f} |"
        )


def tokens_per_second(*more: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hotlap", *RUN.split(), "--runs", folder, "--name", "run", *more]
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        rates = [json.loads(line)["tokens_per_s"] for line in lines if '"kind": "train"' in line]
        return statistics.median(rates[5:])


def print_processes(threads: int) -> None:
    splits = {f"1 × {threads}": ("--threads", str(threads))}
    splits[f"{threads} × 1"] = ("--procs", str(threads), "--threads", "1")
    rates: dict[str, list[float]] = {split: [] for split in splits}
    for _ in range(REPEATS):
        for split, options in splits.items():
            rates[split].append(tokens_per_second(*options))
    print("\n| processes × threads | tokens/s | vs one process |")
    print("|---|---|---|")
    one = rates[f"1 × {threads}"]
    for split, measured in rates.items():
        ratio = statistics.median(here / there for here, there in zip(measured, one, strict=True))
        print(f"| {split} | {statistics.median(measured):,.0f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print_lengths(arguments.threads)
    print_processes(arguments.threads)


if __name__ == "__main__":
    main()
