"""A short run on made-up tokens, and the losses that it had on a CPU in float32.

    python -m hotlap.acceptance.curve SIZE [SIZE …]

computes the losses again and writes them to `curves.json`. `small` takes a quarter of an hour on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.data.shards import shard_name, write_shard
from hotlap.errors import TrainingError
from hotlap.recipes import resolve
from hotlap.runs.reader import RunFiles

RECIPE = "softcap"
STEPS = 20
SEQUENCES = 2  # per step, so that two ranks can share them
SEQUENCE_TOKENS = 512
PHRASES, PHRASE_TOKENS = 500, 8


def write_tokens(directory: Path, vocab_size: int, tokens: int) -> None:
    """Shards of made-up tokens that a model can learn: phrases in random order."""
    random = np.random.default_rng(0)
    phrases = random.integers(0, min(vocab_size, 50_256), (PHRASES, PHRASE_TOKENS))
    for split in ("train", "val"):
        order = random.integers(0, PHRASES, -(-tokens // PHRASE_TOKENS))
        stream = phrases[order].ravel()[:tokens].astype(np.uint16)
        write_shard(directory / shard_name(split, 0), stream, vocab_size)


def settings(size: str, data: Path) -> dict[str, Any]:
    """What such a run changes in the recipe."""
    tokenizer = resolve(RECIPE, size).data.tokenizer
    return {
        "data.source": str(data),
        # Shards without a manifest name no end of text, except GPT-2's.
        "data.tokenizer": "gpt2",
        "data.order": "stream",
        "data.tail": "carry",
        "batch.sequence_tokens": SEQUENCE_TOKENS,
        "batch.tokens_per_step": SEQUENCES * SEQUENCE_TOKENS,
        "schedule.steps": STEPS,
        "schedule.warmup_steps": 0,
        "optim.muon.momentum_warmup_steps": STEPS // 2,
        # The records' learning rate diverges on so few tokens per step.
        "optim.adam.embed_lr": 0.1 if tokenizer == "gpt2" else 0.3,
        "evaluation.every_steps": 0,
        "evaluation.tokens": SEQUENCE_TOKENS,
    }


def command(name: str, size: str, runs: Path, chosen: Mapping[str, Any], *more: str) -> list[str]:
    words = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    run = ["train", RECIPE, "--size", size, "--name", name, "--runs", str(runs)]
    return [sys.executable, "-m", "hotlap", *run, *words, *more]


def train(arguments: Sequence[str], directory: Path) -> list[float]:
    """The training losses of a run in a process of its own."""
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise TrainingError(
            expected="a run that ends well",
            found=f"exit code {done.returncode}: {last_line(done.stderr or done.stdout)}",
            do=f"run it alone: {' '.join(arguments[1:])}",
        )
    return read_losses(directory)


def environment() -> dict[str, str]:
    """Of a child that finds this package, wherever it was started from."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "no output")


def read_losses(directory: Path) -> list[float]:
    return [line["loss"] for line in RunFiles(directory).read_metrics().lines if line["kind"] == "train"]


def stored_curve(size: str) -> list[float] | None:
    """The losses on a CPU in float32, or None for a size that has none."""
    text = (resources.files(__package__) / "curves.json").read_text(encoding="utf-8")
    curve: list[float] | None = json.loads(text).get(size)
    return curve


def main(sizes: Sequence[str]) -> None:
    path = Path(__file__).with_name("curves.json")
    curves = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            data, runs = Path(scratch, "data"), Path(scratch, "runs")
            data.mkdir()
            write_tokens(
                data, resolve(RECIPE, size).model.vocab_size, (STEPS + 1) * SEQUENCES * SEQUENCE_TOKENS
            )
            cpu = ("--device", "cpu", "--precision", "float32", "--checkpoint.every_minutes", "0")
            losses = train(command(size, size, runs, settings(size, data), *cpu), runs / size)
        curves[size] = [round(loss, 5) for loss in losses]
        path.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
