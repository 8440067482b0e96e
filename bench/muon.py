"""What Muon costs, and what each of its parts gains: `python -m bench.muon`, about a minute on two cores.

Every line compares two ways to the same weights within one run. The share of a training step is measured on
the model of `softcap` at 8 layers × 256 and 16,384 tokens, on the CPU and not compiled.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from bench.step import install_kernels
from hotlap.config import Config
from hotlap.hardware import has_native_bf16
from hotlap.kernels import unavailable
from hotlap.kernels.cpu import newton_schulz as kernel
from hotlap.kernels.cpu.muon_math import KernelMath
from hotlap.model import build_model
from hotlap.model.roles import parameter_roles
from hotlap.optim import Muon, orthogonalize, step_coefficients
from hotlap.optim.newton_schulz import GRAM_FIRST_SEGMENT, GRAM_SEGMENT, SMALLEST_NORM, Coefficients
from hotlap.optim.routing import RoutedParameter, build_optimizers, route
from hotlap.recipes import resolve
from hotlap.settings import updated
from tests.ranks import run_ranks

NOT_NATIVE = ", no native bf16"
SHARE_LAYERS, SHARE_WIDTH, SHARE_TOKENS = 8, 256, 16_384


def block_matrices(layers: int, width: int) -> list[torch.nn.Parameter]:
    """The matrices of transformer blocks, with gradients: four squares, one up and one down a layer."""
    shapes = [*[(width, width)] * 4, (4 * width, width), (width, 4 * width)] * layers
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    return matrices


def fused(muon: Muon) -> Muon:
    if not unavailable():
        muon.math = KernelMath()
    return muon


def alternate_ms(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians of calls in turn, so that a busy moment meets both. The first call of each is dropped."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for call, taken in zip((one, other), times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def matmul_gflops(dtype: torch.dtype, size: int = 512) -> float:
    """torch.optim.Muon works in bfloat16; how it compares depends on whether the CPU has it in hardware."""
    matrix = torch.randn(size, size).to(dtype)
    best_ms = min(alternate_ms(lambda: matrix @ matrix, lambda: matrix @ matrix, repeats=3))
    return 2 * size**3 / best_ms / 1e6


def show(what: str, ours_ms: float, other: str, other_ms: float) -> None:
    ratio = other_ms / ours_ms
    print(f"| {what:<44} | {ours_ms:>9.1f} | {other:<28} | {other_ms:>9.1f} | {ratio:>6.2f} |", flush=True)


def against_torch(native: bool) -> None:
    """In float32, and where it is native also in the bfloat16 that torch's always works in."""
    for width in (128, 256):
        for dtype in (torch.float32, *([torch.bfloat16] if native else [])):
            ours = fused(Muon(block_matrices(1, width), ns_dtype=dtype))
            theirs = torch.optim.Muon(block_matrices(1, width), weight_decay=0.0)
            ours_ms, theirs_ms = alternate_ms(ours.step, theirs.step, repeats=2)
            label = f"step, 1 layer × {width}, {str(dtype)[6:]}{'' if native else NOT_NATIVE}"
            show(label, ours_ms, "torch.optim.Muon (bfloat16)", theirs_ms)


def against_torch_without_bf16_instructions() -> None:
    """On a CPU that has them they decide this comparison, so it is run again as on one that has not."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    program = "from bench.muon import against_torch; against_torch(native=False)"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def batched_against_loop() -> None:
    for layers, width in ((6, 64), (6, 128), (8, 256)):
        together = fused(Muon(block_matrices(layers, width)))
        apart = [fused(Muon([matrix])) for matrix in block_matrices(layers, width)]
        times = alternate_ms(together.step, lambda apart=apart: [one.step() for one in apart], repeats=4)  # type: ignore[misc]
        show(f"step, {layers} layers × {width}, batched", times[0], "one matrix after another", times[1])


def by_form(stack: torch.Tensor, coefficients: Coefficients, form: Literal["plain", "gram"]) -> torch.Tensor:
    """By the kernel, where a run would take it."""
    in_cache = stack.shape[0] >= torch.get_num_threads() and stack[0].numel() <= kernel.MOST_ENTRIES
    if unavailable() or not in_cache:
        return orthogonalize(stack, coefficients, form=form)
    segments = (GRAM_FIRST_SEGMENT, GRAM_SEGMENT) if form == "gram" else (1, 1)
    return kernel.orthogonalize(stack, coefficients, *segments, SMALLEST_NORM)


def gram_against_plain() -> None:
    coefficients = step_coefficients("quintic", 5)
    for count, rows, cols in ((12, 128, 512), (12, 512, 128), (16, 256, 1024), (1, 768, 3072)):
        stack = torch.randn(count, rows, cols)
        times = alternate_ms(
            lambda stack=stack: by_form(stack, coefficients, "gram"),  # type: ignore[misc]
            lambda stack=stack: by_form(stack, coefficients, "plain"),  # type: ignore[misc]
            repeats=5,
        )
        show(f"Newton-Schulz, {count} of {rows}×{cols}, Gram", times[0], "plain", times[1])


def share_of_a_step() -> None:
    config: Config = updated(
        resolve("softcap", "nano"),
        {
            "model.num_layers": SHARE_LAYERS,
            "model.width": SHARE_WIDTH,
            "model.num_heads": SHARE_WIDTH // 64,
            "batch.sequence_tokens": SHARE_TOKENS,
            "batch.tokens_per_step": SHARE_TOKENS,
        },
    )
    model = build_model(config.model, SHARE_TOKENS, torch.float32)
    parameters = dict(model.named_parameters())
    declared = [
        RoutedParameter(name, parameters[name], role) for name, role in parameter_roles(model).items()
    ]
    muon = build_optimizers(route(declared, config.optim, world_size=1))[0]
    masking = install_kernels(config, model, [muon])
    masking.set_step(config.schedule.steps // 2)
    tokens = torch.randint(1, config.model.vocab_size, (SHARE_TOKENS + 1,))

    def forward_backward() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens[:-1], tokens[1:], masking.plans(tokens[:-1], None)).backward()

    step_ms, muon_ms = alternate_ms(forward_backward, muon.step, repeats=1)
    label = f"forward and backward, {SHARE_LAYERS} × {SHARE_WIDTH}, {SHARE_TOKENS:,} tokens"
    show(label, step_ms, "Muon's step", muon_ms)
    print(f"  Muon is {100 * muon_ms / (step_ms + muon_ms):.1f} % of that step", flush=True)


def exchange_ms(_rank: int, _world_size: int, layers: int, width: int) -> tuple[float, float]:
    """Run on every rank: a step with each communication."""
    torch.manual_seed(0)
    overlapped, flat = (
        fused(Muon(block_matrices(layers, width), communication=communication))
        for communication in ("overlapped", "flat")
    )

    def in_step(optimizer: Muon) -> None:
        dist.barrier()
        optimizer.step()

    return alternate_ms(lambda: in_step(overlapped), lambda: in_step(flat), repeats=6)


def overlap_against_flat() -> None:
    for layers, width in ((6, 128), (8, 256)):
        overlapped_ms, flat_ms = run_ranks(exchange_ms, 2, layers, width)[0]
        show(
            f"2 gloo ranks, {layers} layers × {width}, overlapped",
            overlapped_ms,
            "one flat all-reduce",
            flat_ms,
        )


def main() -> None:
    torch.manual_seed(0)
    native = has_native_bf16(torch.device("cpu"))  # before the first product, see hardware.amx_faults
    rates = ", ".join(f"{matmul_gflops(dtype):.0f} in {dtype}" for dtype in (torch.float32, torch.bfloat16))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, matmul GFLOP/s: {rates}")
    print(f"| {'ours':<44} | {'ms':>9} | {'other':<28} | {'ms':>9} | other/ours |")
    print(f"|{'-' * 46}|{'-' * 11}|{'-' * 30}|{'-' * 11}|{'-' * 12}|")
    against_torch(native)
    if native:
        against_torch_without_bf16_instructions()
    batched_against_loop()
    gram_against_plain()
    overlap_against_flat()
    share_of_a_step()


if __name__ == "__main__":
    main()
