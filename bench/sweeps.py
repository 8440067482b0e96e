"""The sweeps: variants of a recipe at a size. The first variant is the baseline of the others."""

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
    by_time: bool  # True: train each variant for the time of the first; False: for the configured steps
    variants: Mapping[str, Mapping[str, Any]]


# The dimensions found by the first sweep, with the schedule of a short lap.
SHORT = {
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

# The settings kept after the sweep `ingredients`.
KEPT = {
    "model.rotary": "full",
    "optim.muon.coefficients": "polar-express",
    "optim.muon.newton_schulz_steps": 4,
    "optim.muon.weight_decay": 0.1,
    "optim.muon.cautious_weight_decay": True,
    "optim.adam.embed_lr": 0.6,
    "optim.adam.head_lr": 0.016,
}

# The result of the sweeps of dimensions and hidden widths: `sprint` before it had bigrams.
TWO_NARROW_LAYERS = {**SHORT, **KEPT, "model.width": 96, "model.mlp_ratio": 1, "schedule.steps": 340}


def _variants(base: Mapping[str, Any], changed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {label: {**base, **changes} for label, changes in changed.items()}


SWEEPS = {
    "shape": Sweep(
        "Which depth, width, vocabulary, batch and chunk size are best in the time of 320 steps at 4 x 128?",
        "softcap",
        "nano",
        seeds=1,
        by_time=True,
        variants={
            "4 x 128": {"model.width": 128, "schedule.steps": 320},
            **_variants(
                {**SHORT, "model.width": 128, "schedule.steps": 320},
                {
                    "2 x 128": {},
                    "3 x 128": {"model.num_layers": 3, "model.values": "per-layer"},
                    "2 x 192": {"model.width": 192, "model.num_heads": 3},
                    "2 x 96": {"model.width": 96},
                    "2 x 128, 1024 tokens per step": {
                        "batch.tokens_per_step": 1024,
                        "batch.sequence_tokens": 1024,
                    },
                    "2 x 128, 4096 tokens per step": {
                        "batch.tokens_per_step": 4096,
                        "batch.sequence_tokens": 4096,
                    },
                    "2 x 128, vocabulary 8192": {"model.vocab_size": 8192},
                    "2 x 128, chunk 128": {"data.chunk_tokens": 128},
                },
            ),
        },
    ),
    "nano": Sweep(
        "Which width is best for four layers, in the time of 320 steps of `softcap` at width 128?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            {"model.width": 128, "schedule.steps": 320},
            {
                "4 x 128": {},
                "4 x 96": {"model.width": 96},
                "embed lr 0.3": {"optim.adam.embed_lr": 0.3},
            },
        ),
    ),
    "narrow": Sweep(
        "Widths below 128 were better: which is best in a lap of one minute on two cores?",
        "softcap",
        "nano",
        seeds=1,
        by_time=True,
        variants=_variants(
            {**SHORT, "model.width": 128, "schedule.steps": 600},
            {
                "2 x 128": {},
                "2 x 96": {"model.width": 96},
                "2 x 64": {"model.width": 64},
                "3 x 96": {"model.width": 96, "model.num_layers": 3, "model.values": "per-layer"},
                "4 x 64": {"model.width": 64, "model.num_layers": 4},
                "2 x 96, vocabulary 8192": {"model.width": 96, "model.vocab_size": 8192},
            },
        ),
    ),
    "ingredients": Sweep(
        "What is the effect of each change on its own, at 2 x 96?",
        "softcap",
        "nano",
        seeds=3,
        by_time=False,
        variants=_variants(
            {**SHORT, "model.width": 96, "schedule.steps": 300},
            {
                "base": {},
                "polar express": {"optim.muon.coefficients": "polar-express"},
                "polar express, 4 iterations": {
                    "optim.muon.coefficients": "polar-express",
                    "optim.muon.newton_schulz_steps": 4,
                },
                "cautious weight decay 0.1": {
                    "optim.muon.weight_decay": 0.1,
                    "optim.muon.cautious_weight_decay": True,
                },
                "muon lr 0.03": {"optim.muon.lr": 0.03},
                "muon lr 0.055": {"optim.muon.lr": 0.055},
                "embed lr 0.6": {"optim.adam.embed_lr": 0.6},
                "embed lr 0.15": {"optim.adam.embed_lr": 0.15},
                "head lr 0.016": {"optim.adam.head_lr": 0.016},
                "softcap 30": {"model.softcap": 30.0},
                "a value table per layer": {"model.values": "per-layer"},
                "no value tables": {"model.values": "plain"},
                "window 128 to 256": {"schedule.window_start_tokens": 128},
                "cooldown 0.8": {"schedule.cooldown_fraction": 0.8},
                "full rotary": {"model.rotary": "full"},
            },
        ),
    ),
    "second": Sweep(
        "On top of the changes that helped: which others help, in equal time?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            {**SHORT, **KEPT, "model.width": 96, "schedule.steps": 300},
            {
                "base": {},
                "hidden 8 x width": {"model.mlp_ratio": 8},
                "hidden 2 x width": {"model.mlp_ratio": 2},
                "cooldown 0.4": {"schedule.cooldown_fraction": 0.4},
                "head lr 0.03": {"optim.adam.head_lr": 0.03},
                "chunk and window 512": {
                    "data.chunk_tokens": 512,
                    "schedule.window_start_tokens": 512,
                    "schedule.window_end_tokens": 512,
                },
            },
        ),
    ),
    "third": Sweep(
        "A smaller hidden width was better: how small, and is a third layer worth the time saved?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            {**SHORT, **KEPT, "model.width": 96, "model.mlp_ratio": 2, "schedule.steps": 340},
            {
                "2 x 96, hidden 2 x width": {},
                "2 x 96, hidden 1 x width": {"model.mlp_ratio": 1},
                "3 x 96, hidden 2 x width": {"model.num_layers": 3, "model.values": "per-layer"},
            },
        ),
    ),
    "longer": Sweep(
        "Is the smallest hidden width still the best in a lap of one and a half minutes?",
        "softcap",
        "nano",
        seeds=1,
        by_time=True,
        variants=_variants(
            {**SHORT, **KEPT, "model.width": 96, "schedule.steps": 1000},
            {
                "hidden 2 x width": {"model.mlp_ratio": 2},
                "hidden 1 x width": {"model.mlp_ratio": 1},
            },
        ),
    ),
    "bigrams": Sweep(
        "How many rows should the bigram table have, in equal time?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            TWO_NARROW_LAYERS,
            {
                "no table": {},
                **{
                    f"{rows:,} rows": {"model.bigram_rows": rows}
                    for rows in (8192, 16_384, 32_768, 65_536, 131_072)
                },
            },
        ),
    ),
    "around": Sweep(
        "With the bigram table: are the other settings still the best, in equal time?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            {**TWO_NARROW_LAYERS, "model.bigram_rows": 32_768},
            {
                "base": {},
                "vocabulary 2048": {"model.vocab_size": 2048},
                "vocabulary 3072": {"model.vocab_size": 3072},
                "vocabulary 8192": {"model.vocab_size": 8192},
                "width 64": {"model.width": 64},
                "width 128": {"model.width": 128},
                "momentum 0.9": {"optim.muon.momentum_end": 0.9},
            },
        ),
    ),
    "narrower": Sweep(
        "With the bigram table a smaller width was better in a short lap: is it also better in a full lap?",
        "softcap",
        "nano",
        seeds=1,
        by_time=True,
        variants=_variants(
            {**TWO_NARROW_LAYERS, "model.bigram_rows": 32_768, "schedule.steps": 1300},
            {"2 x 96": {}, "2 x 80": {"model.width": 80}},
        ),
    ),
    "pairs": Sweep(
        "Which optimizer is best for the bigram table, in equal time?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            {**TWO_NARROW_LAYERS, "model.bigram_rows": 32_768},
            {"adam": {}, "row-rms": {"optim.pairs": "row-rms"}},
        ),
    ),
    "given": Sweep(
        "Do the settings that earlier sweeps did not vary hold on the tuning split?",
        "sprint",
        "nano",
        seeds=3,
        by_time=False,
        variants=_variants(
            {"schedule.steps": 340},
            {
                "base": {},
                "Adam beta2 0.95": {"optim.adam.beta2": 0.95},
                "Adam beta2 0.99": {"optim.adam.beta2": 0.99},
                "tokens in order": {"data.order": "stream"},
            },
        ),
    ),
    "pico": Sweep(
        "Are the settings found at nano also better at pico, in equal time?",
        "softcap",
        "pico",
        seeds=3,
        by_time=True,
        variants={
            "softcap": {},
            "sprint": {**SHORT, **KEPT, "model.mlp_ratio": 1, "model.bigram_rows": 32_768},
        },
    ),
}
