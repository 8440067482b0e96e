"""What was swept: a recipe at a size, and variants of it, the first of which is what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sweep:
    question: str
    recipe: str
    size: str
    seeds: int
    by_time: bool  # as many steps as take the first variant's time, or as many as the configuration says
    variants: Mapping[str, Mapping[str, Any]]


TWO_LAYERS = {
    "model.num_layers": 2,
    "model.values": "mirrored",
    "model.drop_attention": False,
    "optim.muon.lr": 0.04,
    "optim.adam.embed_lr": 0.3,
    "optim.adam.beta2": 0.98,
    "schedule.cooldown_fraction": 0.6,
    "schedule.window_start_tokens": 256,
    "schedule.window_end_tokens": 256,
}

SWEEPS = {
    "shape": Sweep(
        "Which depth, width, vocabulary, batch and chunk reach the lowest loss in the time of `softcap` at nano?",
        "softcap",
        "nano",
        seeds=1,
        by_time=True,
        variants={
            "4 x 128": {"schedule.steps": 320},
            "2 x 128": {**TWO_LAYERS, "schedule.steps": 320},
            "3 x 128": {
                **TWO_LAYERS,
                "schedule.steps": 320,
                "model.num_layers": 3,
                "model.values": "per-layer",
            },
            "2 x 192": {**TWO_LAYERS, "schedule.steps": 320, "model.width": 192, "model.num_heads": 3},
            "2 x 96": {**TWO_LAYERS, "schedule.steps": 320, "model.width": 96, "model.num_heads": 2},
            "2 x 128, 1024 a step": {
                **TWO_LAYERS,
                "schedule.steps": 320,
                "batch.tokens_per_step": 1024,
                "batch.sequence_tokens": 1024,
            },
            "2 x 128, 4096 a step": {
                **TWO_LAYERS,
                "schedule.steps": 320,
                "batch.tokens_per_step": 4096,
                "batch.sequence_tokens": 4096,
            },
            "2 x 128, vocabulary 8192": {**TWO_LAYERS, "schedule.steps": 320, "model.vocab_size": 8192},
            "2 x 128, chunk 128": {**TWO_LAYERS, "schedule.steps": 320, "data.chunk_tokens": 128},
        },
    ),
}
