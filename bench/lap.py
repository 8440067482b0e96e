"""How much faster does Hotlap reach the loss of transformers' GPT-2 with AdamW after five minutes?

    python -m bench.lap [--seconds 300] [--seeds 3] [--steps 144]

The baseline is GPT-2 at size `nano` from transformers (https://github.com/huggingface/transformers) in
float32 with the settings of nanoGPT (https://github.com/karpathy/nanoGPT): AdamW with warmup, cosine schedule
and gradient clipping. Its batch size was tuned in its favor (docs/log.md). Hotlap then trains until it
reaches the same loss. Both use the same tokens, threads and validation documents, neither uses
torch.compile, and only training time counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.peak import sgemm_peak_flops
from hotlap.corpus.catalog import ensure_prepared
from hotlap.data.stream import TokenStream, open_split
from hotlap.hardware import tune_malloc, usable_cores
from hotlap.recipes import resolve

NANO = resolve("adamw", "nano").model
CONTEXT, SEQUENCES = 512, 4
LR, WARMUP_FRACTION, FINAL_LR_FRACTION = 3e-3, 0.05, 0.1
# Seconds are also reported scaled to this float32 matmul peak, because machine speed varies.
REFERENCE_PEAK_GFLOPS = 178


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=NANO.vocab_size, n_positions=CONTEXT, n_embd=NANO.width, n_layer=NANO.num_layers,
        n_head=NANO.num_heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def lr_multiplier(elapsed: float, seconds: float) -> float:
    progress = elapsed / seconds
    if progress < WARMUP_FRACTION:
        return progress / WARMUP_FRACTION
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_FRACTION) / (1 - WARMUP_FRACTION)))
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * cosine


def sequences(stream: TokenStream, starts: Sequence[int]) -> torch.Tensor:
    return torch.stack(
        [torch.from_numpy(stream.read(start, CONTEXT + 1).astype("int64")) for start in starts]
    )


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train_gpt2(train: TokenStream, seconds: float) -> tuple[Any, int]:
    """Train for `seconds`. Returns the model and the number of steps."""
    torch.manual_seed(0)
    model = gpt2()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    elapsed, steps = 0.0, 0
    while elapsed < seconds:
        start = time.perf_counter()
        rows = sequences(train, torch.randint(len(train) - CONTEXT - 1, (SEQUENCES,)).tolist())
        for group in optimizer.param_groups:
            group["lr"] = LR * lr_multiplier(elapsed, seconds)
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        elapsed += time.perf_counter() - start
        steps += 1
    return model, steps


@torch.no_grad()
def bits_per_byte(model: Any, val: TokenStream) -> float:
    assert val.text_bytes is not None, "the data has no manifest"
    starts = range(0, len(val) - CONTEXT - 1, CONTEXT)
    batches = [starts[first : first + SEQUENCES] for first in range(0, len(starts), SEQUENCES)]
    total = sum(loss_of(model, sequences(val, batch)).item() * len(batch) for batch in batches)
    return total / len(starts) / math.log(2) * (len(val) - 1) / val.text_bytes


def lap(recipe: str, steps: int, target: float, seed: int, evaluations: int) -> dict[str, Any] | None:
    """The first validation at or below the target, or None. The run is validated `evaluations` times."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", recipe, "--size", "nano", "--steps", str(steps), "--seed", str(seed)]
        # 0: validate at the end only. Otherwise there is also a validation before the first step.
        every_steps = 0 if evaluations == 1 else steps // evaluations
        words += ["--target-bpb", str(target), "--evaluation.every-steps", str(every_steps)]
        words += ["--compile", "off"]
        command = [sys.executable, "-m", "hotlap", *words, "--runs", folder, "--name", "lap"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "lap" / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if line["kind"] == "validation"][-1]
    return last if last["val_bpb"] <= target else None


def print_header() -> None:
    print(
        "| recipe | steps | to bits/byte | reached | training s (mean, each) |"
        f" s at {REFERENCE_PEAK_GFLOPS} GFLOP/s | tokens |\n|---|---|---|---|---|---|---|"
    )


def print_laps(recipe: str, steps: int, target: float, seeds: int, *, evaluations: int) -> float | None:
    """Print a row of the table. Returns the mean training seconds if every seed reached the target."""
    torch.set_num_threads(usable_cores())
    reached, peaks = [], []
    for seed in range(seeds):
        peaks.append(sgemm_peak_flops() / 1e9)
        reached.append(lap(recipe, steps, target, seed, evaluations))
    ended = [line for line in reached if line]
    start = f"| {recipe} | {steps} | {target:.3f} | {len(ended)} of {seeds}"
    if len(ended) < seeds:
        print(f"{start} | – | – | – |", flush=True)
        return None
    seconds = [line["train_s"] for line in ended]
    mean, tokens = statistics.mean(seconds), statistics.mean(line["tokens"] for line in ended)
    at_reference = mean * statistics.mean(peaks) / REFERENCE_PEAK_GFLOPS
    each = ", ".join(f"{s:.1f}" for s in seconds)
    print(f"{start} | {mean:.1f} ({each}) | {at_reference:.1f} | {tokens:,.0f} |", flush=True)
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=144, help="steps of Hotlap's run")
    arguments = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        sys.exit("bench.lap: transformers is not installed; run `pip install -e '.[bench]'`")
    directory = ensure_prepared("sotu", NANO.vocab_size)
    tune_malloc()
    torch.set_num_threads(usable_cores())
    model, steps = train_gpt2(open_split(directory, "train"), arguments.seconds)
    target = bits_per_byte(model, open_split(directory, "val"))
    print(
        f"transformers GPT-2, {NANO.num_layers} × {NANO.width}, AdamW: {target:.4f} bits/byte after"
        f" {arguments.seconds:.0f} s, {steps} steps, {steps * SEQUENCES * CONTEXT:,} tokens\n",
        flush=True,
    )
    print_header()
    mean = print_laps("sprint", arguments.steps, target, arguments.seeds, evaluations=1)
    if mean is not None:
        print(f"\nHotlap reaches this loss {arguments.seconds / mean:.1f} times as fast.")


if __name__ == "__main__":
    main()
