"""Does a token cost the same in a long sequence, and do two processes do as much as one with two threads?

    python -m bench.scaling [--threads 2]

Sequences of 4 layers × 128 at a fixed window, forward and backward, each length in a process of its own so
that peak memory is its own. Processes: short runs of `hotlap train` at `nano` with either split of the cores,
in turn; medians.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench.peak import sgemm_peak_flops
from hotlap.hardware import tune_malloc
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.metrics import peak_rss_mib

LENGTHS = (2048, 4096, 16_384, 65_536)
REPEATS = 3
RUN = (
    "train softcap --size nano --sequence-tokens 1024 --steps 15 --precision float32 --compile off"
    " --evaluation.every-steps 0 --evaluation.tokens 1024"
)


def measure_length(tokens: int, threads: int) -> tuple[float, float]:
    """Seconds of a step, and the memory that it needed beyond imports and model, in MiB."""
    from bench.step import make_model, measure_step

    tune_malloc()
    torch.set_num_threads(threads)
    config = updated(
        resolve("softcap", "nano"),
        {
            "batch.sequence_tokens": tokens,
            "batch.tokens_per_step": tokens,
            "schedule.window_start_tokens": 512,
            "schedule.window_end_tokens": 512,
        },
    )
    model = make_model(config, torch.float32)
    sgemm_peak_flops()  # is measured beside every step; its matrices are not the step's memory
    before = peak_rss_mib()
    seconds = measure_step(config, model, repeats=3).seconds
    return seconds, peak_rss_mib() - before


def print_lengths(threads: int) -> None:
    print("| sequence tokens | ms | µs a token | over 4,096 | MiB | KiB a token |")
    print("|---|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        measured = {tokens: pool.submit(measure_length, tokens, threads).result() for tokens in LENGTHS}
    base = measured[4096][0] / 4096
    for tokens, (seconds, mib) in measured.items():
        cost = seconds / tokens
        print(
            f"| {tokens:,} | {seconds * 1e3:.0f} | {cost * 1e6:.1f} | {cost / base:.2f} | {mib:.0f} |"
            f" {mib * 1024 / tokens:.1f} |"
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
    print("\n| processes × threads | tokens/s | over one process |")
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
