"""Runs of the trainer for tests: in this process where that is enough, as a command where it is not."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hotlap.config import Config
from hotlap.recipes import resolve
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.settings import updated
from hotlap.train.run import Result, RunOptions, run

# One thread and float32 whatever the machine: the same sums in the same order everywhere.
PLAIN = {"runtime.threads": 1, "runtime.precision": "float32", "runtime.compile": "off"}


def pico(data: Path, steps: int, recipe: str = "softcap", **changes: Any) -> Config:
    """A recipe at `pico` on prepared data; settings with `__` for the dots of their names."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return updated(
        resolve(recipe, "pico"),
        {
            **PLAIN,
            "data.source": str(data),
            "schedule.steps": steps,
            "evaluation.tokens": 1024,
            "optim.muon.momentum_warmup_steps": 10,
            "schedule.warmup_steps": 0,
            "schedule.cooldown_steps": 0,
            **named,
        },
    )


def train(config: Config, root: Path, name: str, resume: bool = False) -> Result:
    """Train in this process."""
    checkpoint = store.load_latest(root / name / "checkpoints")[0] if resume else None
    return run(config, RunOptions(root, name, checkpoint), Console(file=io.StringIO()))


def losses(run_directory: Path) -> list[float]:
    """The training losses that a run wrote down, by step from 1."""
    lines = [line for line in RunDirectory(run_directory).read_metrics().lines if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def assert_one_curve(found: list[float], expected: list[float]) -> None:
    """The same sums in another order. Their rounding grows through the first updates, to 2e-4 at worst in
    four seeds and three splits, with the kernels in C and without.
    """
    assert found[:2] == pytest.approx(expected[:2], abs=1e-5)
    assert found == pytest.approx(expected, abs=5e-4)


def final_weights(run_directory: Path) -> dict[str, Any]:
    return dict(store.load(store.latest(run_directory / "checkpoints")).tensors["model"])


def command(data: Path, steps: int, *more: str) -> list[str]:
    """The arguments of `hotlap train` for such a run."""
    settings = {
        "--data.source": str(data),
        "--steps": str(steps),
        "--threads": "1",
        "--precision": "float32",
        "--compile": "off",
        "--evaluation.tokens": "1024",
    }
    words = [word for pair in settings.items() for word in pair]
    return ["train", "softcap", "--size", "pico", *words, *more]


def start(arguments: Sequence[str], cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """A `hotlap` command in the background."""
    root = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "hotlap", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": root,
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            **variables,
        },
    )
