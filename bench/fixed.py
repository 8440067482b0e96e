"""What does it cost that a run's bits do not depend on ranks and threads (`runtime.reduction = fixed`)?

    python -m bench.fixed [--sizes pico nano]

Milliseconds per step of `softcap`, four sequences per step, without and with the fixed reduction, in
processes of their own that take turns: medians of the steps after the first ones. Two cores as two threads of
one rank, and as two ranks. The last row has one sequence per step, as `nano` by default, for which the fixed
reduction uses one thread.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from hotlap.hardware import has_native_bf16

STEPS, FIRST_STEPS = 70, 20  # the first ones warm up, and are not counted


class Row(NamedTuple):
    size: str
    sequence_tokens: int
    precision: str
    ranks: int
    threads: int

    def step_ms(self, reduction: str, folder: Path) -> float:
        """The median of a run, by its own record."""
        settings = {
            "runtime.reduction": reduction,
            "runtime.precision": self.precision,
            "runtime.threads": self.threads,
            "batch.sequence_tokens": self.sequence_tokens,
            "schedule.steps": STEPS,
            "evaluation.every_steps": 0,
            "evaluation.tokens": 1024,
        }
        words = [sys.executable, "-m", "hotlap", "train", "softcap", "--size", self.size]
        words += [f"--{name}={value}" for name, value in settings.items()]
        words += ["--procs", str(self.ranks)] if self.ranks > 1 else []
        words += ["--runs", str(folder), "--name", reduction]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        lines = map(json.loads, (folder / reduction / "metrics.jsonl").read_text().splitlines())
        config = json.loads((folder / reduction / "config.json").read_text())
        speeds = [line["tokens_per_s"] for line in lines if line["kind"] == "train"][FIRST_STEPS:]
        tokens: int = config["batch"]["tokens_per_step"]
        return 1000 * tokens / statistics.median(speeds)


def rows(sizes: list[str]) -> list[Row]:
    precisions = ["float32", *(["bfloat16"] if has_native_bf16(torch.device("cpu")) else [])]
    in_fours = [
        Row(size, 512, precision, ranks, 2 // ranks)
        for size in sizes
        for precision in precisions
        for ranks in (1, 2)
    ]
    return in_fours + ([Row("nano", 2048, "float32", 1, 2)] if "nano" in sizes else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["pico", "nano"], choices=["pico", "nano"])
    print("| size | sequences | precision | ranks × threads | averaged, ms | fixed, ms | more |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(parser.parse_args().sizes):
        with tempfile.TemporaryDirectory() as folder:
            averaged, fixed = (row.step_ms(reduction, Path(folder)) for reduction in ("averaged", "fixed"))
        print(
            f"| {row.size} | {2048 // row.sequence_tokens} × {row.sequence_tokens} | {row.precision} |"
            f" {row.ranks} × {row.threads} | {averaged:.1f} | {fixed:.1f} | {fixed / averaged - 1:+.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
