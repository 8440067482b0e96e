"""Run directories as the trainer writes them, made up in milliseconds, with the curves a test asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.recipes import resolve
from hotlap.settings import to_json

LOSS_TO_BPB = 0.35


def environment() -> dict[str, Any]:
    return {
        "hotlap": "0.1.0",
        "python": "3.11.2",
        "torch": "2.13.0",
        "device": "cpu",
        "device_name": "A processor <of note>",
        "world_size": 1,
        "precision": "float32",
        "attention_backend": "blocked",
        "variables": {"OMP_NUM_THREADS": "2"},
        "data": {"source": "sotu", "train_tokens": 2_690_000, "val_bytes": 758_182},
        "model": {"parameters": 1_234_567, "flops_per_token": 7_400_000},
        "routing": [
            {
                "parameter": "blocks.0.mlp.up",
                "shape": [64, 256],
                "optimizer": "muon",
                "lr": 0.05,
                "owner": 0,
            },
            {"parameter": "embed", "shape": [512, 64], "optimizer": "adam", "lr": 0.6, "owner": None},
        ],
    }


def metric_lines(
    *,
    steps: int,
    final_loss: float,
    step_s: float = 0.1,
    seed: int = 0,
    every: int = 10,
    has_bpb: bool = True,
    clips: bool = False,
    sample: str = "The state of the Union is strong.",
) -> list[dict[str, Any]]:
    """A loss that falls from 6 to exactly `final_loss`, with noise on the training loss."""
    noise = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []

    def validate(step: int) -> None:
        loss = final_loss + (6 - final_loss) * (math.exp(-4 * step / steps) - math.exp(-4)) / (
            1 - math.exp(-4)
        )
        lines.append(
            {
                "kind": "validation",
                "step": step,
                "val_loss": loss,
                "val_bpb": loss * LOSS_TO_BPB if has_bpb else None,
                "tokens": step * 512,
                "train_s": step * step_s,
                "window": 128,
            }
        )

    validate(0)
    for step in range(1, steps + 1):
        lines.append(
            {
                "kind": "train",
                "step": step,
                "loss": final_loss + (6 - final_loss) * math.exp(-4 * step / steps) + noise.normal(0, 0.05),
                "lr": min(1.0, 2 * (1 - step / steps)),
                "momentum": min(0.95, 0.85 + 0.002 * step),
                "window": 128 * (1 + 3 * step // steps),
                "tokens": step * 512,
                "train_s": step * step_s,
                "tokens_per_s": 512 / step_s,
                "grad_norm": 1 + 1 / step if clips else None,
                "memory_mib": 300.0 + step / steps,
            }
        )
        if step % every == 0 or step == steps:
            validate(step)
    lines.append({"kind": "sample", "step": steps, "text": sample})
    return lines


def make_run(
    directory: Path,
    *,
    recipe: str = "softcap",
    seed: int = 0,
    changes: dict[str, Any] | None = None,
    steps: int = 50,
    final_loss: float = 3.3,
    step_s: float = 0.1,
    status: str | None = "finished",
    started: str = "2026-01-01T00:00:00Z",
    **curve: Any,
) -> Path:
    """Writes a run directory; `status=None` leaves it without a summary, as a run that is still going."""
    directory.mkdir(parents=True)
    config = resolve(recipe, "pico", {"seed": seed, "schedule.steps": steps, **(changes or {})})
    (directory / "config.json").write_text(json.dumps(to_json(config)))
    (directory / "environment.json").write_text(json.dumps({**environment(), "started": started}))
    lines = metric_lines(steps=steps, final_loss=final_loss, step_s=step_s, seed=seed, **curve)
    append_metrics(directory, lines)
    if status:
        summary = {
            "status": status,
            "steps": steps,
            "tokens": steps * 512,
            "val_loss": final_loss,
            "val_bpb": final_loss * LOSS_TO_BPB,
            "target": None,
            "seconds": {
                "setup": 1.0,
                "compile": 0.0,
                "training": steps * step_s,
                "validation": 0.5,
                "total": 1.5 + steps * step_s,
            },
            "tokens_per_s": 512 / step_s,
            "peak_fraction": 0.5,
            "peak_rss_mib": 301,
            "nan_steps": 0,
        }
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def append_metrics(directory: Path, lines: Sequence[dict[str, Any]]) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def end_without_finite_loss(directory: Path) -> None:
    """As the trainer writes a last validation whose loss was not finite."""
    nan = {"kind": "validation", "step": 60, "val_loss": None, "val_bpb": None, "tokens": 1, "train_s": 9}
    append_metrics(directory, [nan])
    path = directory / "summary.json"
    if path.exists():
        path.write_text(json.dumps({**json.loads(path.read_text()), "val_loss": None, "val_bpb": None}))


def make_race(
    directory: Path,
    losses: dict[str, Sequence[float]],
    changes: dict[str, dict[str, Any]] | None = None,
    **run: Any,
) -> Path:
    """One run a recipe and seed, `losses[label]` being the final losses of seeds 0, 1, …"""
    for position, (label, finals) in enumerate(losses.items()):
        for seed, final in enumerate(finals):
            make_run(
                directory / f"{label}-{seed}",
                recipe=label.split(":")[0],
                seed=seed,
                changes=(changes or {}).get(label),
                final_loss=final,
                step_s=0.1 * (1 + 0.01 * seed),
                started=f"2026-01-01T{seed:02}:{position:02}:00Z",
                **run,
            )
    return directory
