"""How much of the machine's matrix-product peak does a training step reach, and what does the optimizer cost?

    python -m bench.step [--threads 2] [--sizes 6x128 8x256 12x768]

Forward and backward of the `softcap` model, counting 6 FLOP per weight of a matrix product and token plus
attention over the visible block pairs, as a fraction of what plain float32 products do right before and after
each step. "of peak" takes the best of five products, "of median" their median: a neighbour's busy moments
spare the best of a few short products but hardly a step of seconds, so that on a noisy machine only the
second compares like with like. Medians of five steps or more, as many as fit into a while. Compiled is what
a long run would compile: blocks, where there are no kernels in C. Optimizers are timed in turn with the steps
of a lap, whose gradients and weights they find as a run leaves them.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from bench.peak import matmul_rates
from hotlap.config import Config
from hotlap.hardware import has_native_bf16, tune_malloc
from hotlap.kernels import choose_backend, install, unavailable
from hotlap.model import GPT, GPT2, build_model
from hotlap.optim.routing import build_optimizers
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.compile import apply_compile
from hotlap.train.flops import matmul_flops_per_token
from hotlap.train.lap import route_parameters, saved_bytes_per_layer
from hotlap.train.masking import Masking

CPU = torch.device("cpu")
FEWEST_STEPS = 5
SECONDS_A_ROW = 15
# size: (heads, tokens, vocabulary, window in blocks)
SIZES = {
    "6x128": (2, 8192, 4096, 4),
    "8x256": (4, 8192, 4096, 4),
    "12x768": (6, 4096, 50304, 14),
}
# For the optimizer's share of a lap's own steps: recipes at nano, at their widest window.
LAPS = {"nano softcap": "softcap", "nano sprint": "sprint"}


def configuration(size: str) -> Config:
    if size in LAPS:
        lap = resolve(LAPS[size], "nano")
        return updated(lap, {"schedule.window_start_tokens": lap.schedule.window_end_tokens})
    layers, width = map(int, size.split("x"))
    heads, tokens, vocabulary, window_blocks = SIZES[size]
    return updated(
        resolve("softcap", "small"),
        {
            "model.num_layers": layers,
            "model.width": width,
            "model.num_heads": heads,
            "model.vocab_size": vocabulary,
            "batch.sequence_tokens": tokens,
            "batch.tokens_per_step": tokens,
            "schedule.window_start_tokens": window_blocks * 128,
            "schedule.window_end_tokens": window_blocks * 128,
        },
    )


def ways_of(size: str) -> list[tuple[torch.dtype, str]]:
    """Precision and what is compiled, of the rows of a size."""
    if size not in LAPS:
        return [(torch.float32, "block" if unavailable() else "off")]
    precisions = [torch.float32, *([torch.bfloat16] if has_native_bf16(CPU) else [])]
    return [(precision, "off") for precision in precisions]


def step_flops(config: Config) -> float:
    """Of one sequence that is one document."""
    window = config.schedule.window_end_tokens // 128
    blocks = config.batch.sequence_tokens // 128
    pairs = sum(min(block + 1, window) for block in range(blocks))
    layers = config.model.num_layers - len(config.model.attention_free_layers)
    attention = 12 * layers * config.model.width * pairs * 128**2
    return config.batch.sequence_tokens * matmul_flops_per_token(config) + attention


def make_model(config: Config, dtype: torch.dtype) -> GPT | GPT2:
    torch.manual_seed(0)
    model = build_model(config.model, config.batch.sequence_tokens, dtype)
    for parameter in model.parameters():
        # A step in the middle of training: nothing is zero.
        if parameter.ndim == 2 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def install_kernels(
    config: Config, model: GPT | GPT2, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Masking:
    """What a lap installs on this machine; returns the masking that goes with it."""
    backend = choose_backend("auto", CPU, saved_bytes=saved_bytes_per_layer(config))
    install(model, optimizers, backend=backend, tokens=config.batch.sequence_tokens)
    return Masking(config, backend, 0, CPU)


class Step(NamedTuple):
    seconds: float
    of_peak: float  # of the best product before a step and the best one after it
    of_median: float
    optimizer_seconds: float


def measure_step(
    config: Config, model: GPT | GPT2, masking: Masking, optimizers: Sequence[torch.optim.Optimizer]
) -> Step:
    """Medians, after a first step that is not counted."""
    count, vocabulary = config.batch.sequence_tokens, config.model.vocab_size
    tokens = torch.randint(1, vocabulary, (count,), dtype=torch.int32)
    targets = torch.randint(1, vocabulary, (count,))
    flops, seconds, of_optimizers, products = step_flops(config), [], [], [matmul_rates()]
    started = time.perf_counter()
    while len(seconds) <= FEWEST_STEPS or time.perf_counter() - started < SECONDS_A_ROW:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        model(tokens, targets, masking.plans(tokens, None)).backward()
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        of_optimizers.append(time.perf_counter() - start)
        products.append(matmul_rates())
    seconds, of_optimizers = seconds[1:], of_optimizers[1:]
    around = list(zip(seconds, pairwise(products[1:]), strict=True))
    of_peak, of_median = (
        statistics.median(
            2 * flops / taken / (rate(before) + rate(after)) for taken, (before, after) in around
        )
        for rate in (max, statistics.median)
    )
    return Step(statistics.median(seconds), of_peak, of_median, statistics.median(of_optimizers))


def optimizers_of(config: Config, model: GPT | GPT2) -> list[torch.optim.Optimizer]:
    routing = route_parameters(model, config, world_size=1)
    return build_optimizers(routing, ns_dtype=model.dtype, check_finite=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=[*LAPS, *SIZES], choices=[*LAPS, *SIZES])
    arguments = parser.parse_args()
    tune_malloc()
    torch.set_num_threads(arguments.threads)
    print("| size | tokens | precision | compiled | ms | tokens/s | of peak | of median | optimizer |")
    print("|---|---|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        config = configuration(size)
        for dtype, mode in ways_of(size):
            torch.compiler.reset()
            model = make_model(config, dtype)
            optimizers = optimizers_of(config, model) if size in LAPS else []
            masking = install_kernels(config, model, optimizers)
            apply_compile(BatchLoss(model, masking), mode, coordinate_descent=False)
            step = measure_step(config, model, masking, optimizers)
            share = ""
            if size in LAPS:
                share = f"{step.optimizer_seconds / (step.optimizer_seconds + step.seconds):.1%}"
            tokens = config.batch.sequence_tokens
            print(
                f"| {size} | {tokens} | {str(dtype)[6:]} | {mode} | {step.seconds * 1e3:.0f} |"
                f" {tokens / step.seconds:,.0f} | {step.of_peak:.2f} | {step.of_median:.2f} |"
                f" {share} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
