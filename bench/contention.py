"""How much of a training step's speed is left beside other work, and does sharing the cores give more of it?

    python -m bench.contention [--threads 2] [--steps 24]

Training steps of `sprint` at `nano` on made-up tokens, alone and beside processes that do nothing but count.
OpenMP's threads wait for each other many times per step. By default they spin meanwhile, and beside other
work a spinning thread takes the core from the one it waits for. The `hotlap` command lets them sleep while
others need the cores (`hotlap/waiting.py`). Each way has a process of its own, measured in turn so that a
busy moment meets both. All measurements train from the same weights and must end with the same bits. Medians.
What other processes use is looked at before each measurement, because beside them nothing here is idle.
"""

import argparse
import hashlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager

import psutil
import torch

from bench.step import configuration, install_kernels, make_model, optimizers_of
from hotlap.hardware import tune_malloc
from hotlap.waiting import LOOK_SECONDS, WAIT_VARIABLES, sharing_cores

BUSY_PROCESSES = (0, 1, 2)
WARMUP_STEPS = 3
REPEATS = 3
SETTLE_SECONDS = 2.5 * LOOK_SECONDS  # until a process has noticed that others came or went
IDLE_CORES = 0.2  # what others may use of a machine that counts as idle
COUNT = "n = 0\nwhile True: n += 1"
FOR_LIFE = ExitStack()  # of a process: what a temporary one had entered would end with it
# What libgomp does by default, chosen by name so that nothing else chooses; and what the command does.
WAYS = {"spinning": {"GOMP_SPINCOUNT": "300000"}, "sharing": {}}


class Steps:
    """Training steps in a process whose threads wait in one way."""

    def __init__(self, waiting: Mapping[str, str], threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, spawn, initializer=start, initargs=(threads,))
        with variables(waiting):  # OpenMP reads them when torch is loaded
            self.pool.submit(train, WARMUP_STEPS).result()
        self.rates: dict[int, list[float]] = {busy: [] for busy in BUSY_PROCESSES}  # tokens/s
        self.cores_of_others: list[float] = []

    def measure(self, busy: int, steps: int) -> str:
        """Adds a rate; returns the hash of the weights that the steps led to."""
        self.cores_of_others.append(psutil.cpu_count() * psutil.cpu_percent(LOOK_SECONDS) / 100)
        with busy_processes(busy):
            rate, weights = self.pool.submit(train, steps).result()
        self.rates[busy].append(rate)
        return weights


@contextmanager
def variables(waiting: Mapping[str, str]) -> Iterator[None]:
    """For processes started within the `with`: these variables, and no others that say how threads wait."""
    before = {name: os.environ.pop(name) for name in WAIT_VARIABLES if name in os.environ}
    os.environ.update(waiting)
    try:
        yield
    finally:
        for name in waiting:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", COUNT]) for _ in range(count)]
    time.sleep(SETTLE_SECONDS)
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def start(threads: int) -> None:
    FOR_LIFE.enter_context(sharing_cores())
    tune_malloc()
    torch.set_num_threads(threads)


def train(steps: int) -> tuple[float, str]:
    """Tokens per second of some steps from the same start, and a hash of the weights after them."""
    config = configuration("nano sprint")
    model = make_model(config, torch.float32)
    optimizers = optimizers_of(config, model)
    masking = install_kernels(config, model, optimizers)
    count = config.batch.sequence_tokens
    ids = torch.randint(1, config.model.vocab_size, (count + 1,))
    tokens, targets = ids[:-1].to(torch.int32), ids[1:]
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        model(tokens, targets, masking.plans(tokens, None)).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return count * steps / sum(seconds), weights.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24, help="per measurement")
    arguments = parser.parse_args()
    ways = {name: Steps(waiting, arguments.threads) for name, waiting in WAYS.items()}
    weights = {
        way.measure(busy, arguments.steps)
        for _ in range(REPEATS)
        for busy in BUSY_PROCESSES
        for way in ways.values()
    }
    print("| busy processes | spinning, tokens/s | of idle | sharing, tokens/s | of idle | over spinning |")
    print("|---|---|---|---|---|---|")
    for busy in BUSY_PROCESSES:
        cells = []
        for way in ways.values():
            of_idle = median_ratio(way.rates[busy], way.rates[0])
            cells.append(f"{statistics.median(way.rates[busy]):,.0f} | {of_idle:.2f}")
        gain = median_ratio(ways["sharing"].rates[busy], ways["spinning"].rates[busy])
        print(f"| {busy} | {' | '.join(cells)} | {gain:.2f} |")
    for way in ways.values():
        way.pool.shutdown()
    assert len(weights) == 1, "how threads wait changed what was computed"
    count = len(WAYS) * len(BUSY_PROCESSES) * REPEATS
    print(f"\nEvery weight has the same bits after all {count} measurements of {arguments.steps} steps each.")
    others = [cores for way in ways.values() for cores in way.cores_of_others]
    if max(others) > IDLE_CORES:
        print(
            f"\nNot an idle machine: other processes used {statistics.median(others):.1f} cores, at most"
            f" {max(others):.1f}. The first row is not that of an idle one, nor are ratios to it."
        )


def median_ratio(rates: list[float], base: list[float]) -> float:
    return statistics.median(rate / idle for rate, idle in zip(rates, base, strict=True))


if __name__ == "__main__":
    main()
