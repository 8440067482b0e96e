"""How much sooner is a lap at the loss that transformers' GPT-2 with AdamW reaches in five minutes?

    python -m bench.lap [--seconds 300] [--seeds 3]

GPT-2 of the size of `nano`, from transformers, with the settings that nanoGPT is known for: AdamW at 3e-3 with
warm-up, cosine and clipping, 16 sequences of 512 tokens a step. Same tokens, same threads, same validation
documents; only time spent training counts. Then laps of Hotlap that stop when they reach its loss, and whole
ones for the time to other marks.
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
from hotlap.data.catalogue import ensure_prepared
from hotlap.data.stream import TokenStream, open_split
from hotlap.hardware import tune_malloc, usable_cores

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 128, 2, 4096
CONTEXT, SEQUENCES = 512, 16
LR, WARMUP_SHARE, FINAL_SHARE = 3e-3, 0.05, 0.1
# What the marks of the laps are given for.
REFERENCE_PEAK_GFLOPS = 178
# Steps of a lap, and the bits/byte whose time is asked for.
LAPS = (("sprint", 330, 1.488), ("sprint", 480, 1.422), ("sprint", 900, 1.340), ("softcap", 480, 1.422))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def lr_share(elapsed: float, seconds: float) -> float:
    progress = elapsed / seconds
    if progress < WARMUP_SHARE:
        return progress / WARMUP_SHARE
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)))
    return FINAL_SHARE + (1 - FINAL_SHARE) * cosine


def sequences(stream: TokenStream, starts: Sequence[int]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(stream.read(start, CONTEXT + 1).astype("int64")) for start in starts])


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train_gpt2(train: TokenStream, seconds: float) -> tuple[Any, int]:
    """The model after so many seconds of training, and its steps."""
    torch.manual_seed(0)
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    elapsed, steps = 0.0, 0
    while elapsed < seconds:
        start = time.perf_counter()
        rows = sequences(train, torch.randint(len(train) - CONTEXT - 1, (SEQUENCES,)).tolist())
        for group in optimizer.param_groups:
            group["lr"] = LR * lr_share(elapsed, seconds)
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        elapsed += time.perf_counter() - start
        steps += 1
    return model, steps


@torch.no_grad()
def bits_per_byte(model: Any, val: TokenStream) -> float:
    assert val.text_bytes is not None, "the corpus comes with a manifest"
    starts = range(0, len(val) - CONTEXT - 1, CONTEXT)
    losses = [loss_of(model, sequences(val, [start])).item() for start in starts]
    return statistics.mean(losses) / math.log(2) * (len(val) - 1) / val.text_bytes


def lap(recipe: str, steps: int, target: float, seed: int) -> dict[str, Any] | None:
    """The first validation at or below the target, looked for every 15 steps; None if never reached."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", recipe, "--size", "nano", "--steps", str(steps), "--seed", str(seed)]
        words += ["--target-bpb", str(target), "--evaluation.every-steps", "15"]
        command = [sys.executable, "-m", "hotlap", *words, "--runs", folder, "--name", "lap"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "lap" / "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if line["kind"] == "validation"][-1]
    return last if last["val_bpb"] <= target else None


def print_laps(recipe: str, steps: int, target: float, seeds: int, gflops: float) -> list[float]:
    """Training seconds of those that reached the target."""
    reached = [found for seed in range(seeds) if (found := lap(recipe, steps, target, seed))]
    seconds = [found["train_s"] for found in reached]
    if not seconds:
        print(f"| {recipe} | {steps} | {target:.3f} | 0 of {seeds} | – | – | – |", flush=True)
        return seconds
    mean = statistics.mean(seconds)
    print(
        f"| {recipe} | {steps} | {target:.3f} | {len(reached)} of {seeds} | {mean:.1f} |"
        f" {mean * gflops / REFERENCE_PEAK_GFLOPS:.1f} | {statistics.mean(r['tokens'] for r in reached):,.0f} |",
        flush=True,
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-steps", type=int, default=100, help="of the lap against GPT-2")
    parser.add_argument("--only", choices=["gpt2", "marks"])
    arguments = parser.parse_args()
    directory = ensure_prepared("sotu", VOCABULARY)
    tune_malloc()
    torch.set_num_threads(usable_cores())
    gflops = sgemm_peak_flops() / 1e9
    header = (
        "| recipe | steps | to bits/byte | reached | training s (mean) |"
        f" s at {REFERENCE_PEAK_GFLOPS} GFLOP/s | tokens |\n|---|---|---|---|---|---|---|"
    )
    if arguments.only != "marks":
        if importlib.util.find_spec("transformers") is None:
            sys.exit("bench.lap: transformers is not installed; `pip install -e .[bench]` brings it")
        model, steps = train_gpt2(open_split(directory, "train"), arguments.seconds)
        target = bits_per_byte(model, open_split(directory, "val"))
        print(
            f"transformers GPT-2, {LAYERS} × {WIDTH}, AdamW: {target:.4f} bits/byte after"
            f" {arguments.seconds:.0f} s, {steps} steps, {steps * SEQUENCES * CONTEXT:,} tokens\n"
        )
        print(header)
        seconds = print_laps("sprint", arguments.first_steps, target, arguments.seeds, gflops)
        if seconds:
            print(f"\nHotlap is there {arguments.seconds / statistics.mean(seconds):.1f} times as fast.\n")
    if arguments.only != "gpt2":
        print(header)
        for recipe, steps, target in LAPS:
            print_laps(recipe, steps, target, arguments.seeds, gflops)


if __name__ == "__main__":
    main()
