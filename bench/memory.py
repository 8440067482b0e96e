"""How much memory does a training step of the 12 × 768 model with GPT-2's vocabulary need?

    python -m bench.memory [--threads 2]      about three minutes on two cores

Forward, backward and both optimizers, without torch.compile, on one document. Each precision runs in its own
process; the numbers are its peak resident set size so far.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from bench.step import CPU, configuration, install_kernels, make_model
from hotlap.hardware import has_native_bf16, tune_malloc
from hotlap.optim.routing import build_optimizers
from hotlap.settings import updated
from hotlap.train.flops import peak_rss_mib
from hotlap.train.lap import route_parameters

TOKENS = 16_384


def measure(dtype: torch.dtype, threads: int) -> list[float]:
    """Peak GiB after building the model, the forward, the backward and the optimizer step."""
    tune_malloc()
    torch.set_num_threads(threads)
    changes = {"batch.sequence_tokens": TOKENS, "batch.tokens_per_step": TOKENS}
    config = updated(configuration("12x768"), changes)
    model = make_model(config, dtype)
    routing = route_parameters(model, config, world_size=1)
    optimizers = build_optimizers(routing, ns_dtype=dtype, check_finite=False)
    masking = install_kernels(config, model, optimizers)
    tokens = torch.randint(1, config.model.vocab_size, (TOKENS + 1,))
    peaks = [peak_rss_mib()]
    loss = model(tokens[:-1], tokens[1:], masking.plans(tokens[:-1], None))
    peaks.append(peak_rss_mib())
    loss.backward()
    peaks.append(peak_rss_mib())
    for optimizer in optimizers:
        optimizer.step()
    peaks.append(peak_rss_mib())
    return [peak / 1024 for peak in peaks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    print("| precision | model | forward | backward | optimizers, GiB |")
    print("|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    precisions = [torch.float32, *([torch.bfloat16] if has_native_bf16(CPU) else [])]
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for dtype in precisions:
            peaks = pool.submit(measure, dtype, threads).result()
            print(f"| {str(dtype)[6:]} | {' | '.join(f'{peak:.1f}' for peak in peaks)} |", flush=True)


if __name__ == "__main__":
    main()
