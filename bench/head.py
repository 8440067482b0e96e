"""What do chunks, and the kernels in C, save against the plain head, in time and in memory?

    python -m bench.head [--threads 2] [--repeats 2]

Each line is a process of its own, so that its peak memory is its own: the growth of the resident set from
before the first call to the peak, over forward and backward, gradients included. The heads of a shape are
held against the highest sgemm peak that one of them saw. Float32 on the CPU.
"""

import argparse
import math
import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from bench.peak import best_seconds, sgemm_peak_flops
from hotlap.hardware import tune_malloc
from hotlap.kernels import unavailable
from hotlap.kernels.chunked_loss import chunked_cross_entropy
from hotlap.kernels.cpu.head import MOST_WEIGHTS
from hotlap.model.head import cross_entropy

SHAPES = [(4096, 128, 4096), (1024, 768, 50304)]  # tokens, width, vocabulary
SOFTCAP = 15.0


def peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Measured(NamedTuple):
    head: str
    seconds: float
    grown_bytes: int
    peak_flops: float


def heads() -> list[str]:
    """Kernels do all of a chunk where the weight fits a cache, and elsewhere the passes over its logits."""
    return ["plain", "chunks", *([] if unavailable() else ["kernels"])]


def measure(shape: tuple[int, int, int], head: str, threads: int, repeats: int) -> Measured:
    num_tokens, width, vocabulary = shape
    torch.set_num_threads(threads)
    x = torch.randn(num_tokens, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (num_tokens,))
    in_c = "all" if weight.numel() <= MOST_WEIGHTS else "rows"
    function = {
        "plain": cross_entropy,
        "chunks": chunked_cross_entropy,
        "kernels": partial(chunked_cross_entropy, passes=in_c),
    }[head]

    def call() -> None:
        x.grad = weight.grad = None
        function(x, weight, targets, SOFTCAP).backward()

    before = peak_resident_bytes()
    call()
    grown = peak_resident_bytes() - before
    tune_malloc()  # only now: it trades memory for time
    seconds = best_seconds(call, repeats)
    return Measured(head, seconds, grown, sgemm_peak_flops())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print("| tokens, width, vocabulary | head | ms | MB | of peak |")
    print("|---|---|---|---|---|")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for shape in SHAPES:
            asked = [
                pool.submit(measure, shape, head, arguments.threads, arguments.repeats) for head in heads()
            ]
            measured = [call.result() for call in asked]
            flops = 3 * 2 * math.prod(shape)  # three products
            peak = max(one.peak_flops for one in measured)
            for one in measured:
                sizes = ", ".join(str(size) for size in shape)
                print(
                    f"| {sizes} | {one.head} | {one.seconds * 1e3:.0f} | {one.grown_bytes / 1e6:.0f} |"
                    f" {flops / one.seconds / peak:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
