"""What was swept: variants of a recipe at a size, the first of which is what the others are compared with."""

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


# The shape that the first sweep found, with the schedule of a short lap.
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

# What the sweep of ingredients kept.
PAID = {
    "model.rotary": "full",
    "optim.muon.coefficients": "polar-express",
    "optim.muon.newton_schulz_steps": 4,
    "optim.muon.weight_decay": 0.1,
    "optim.muon.cautious_weight_decay": True,
    "optim.adam.embed_lr": 0.6,
    "optim.adam.head_lr": 0.016,
}

# What the sweeps of shapes and hidden widths left: `sprint` before it had bigrams.
TWO_NARROW_LAYERS = {**SHORT, **PAID, "model.width": 96, "model.mlp_ratio": 1, "schedule.steps": 340}


def _variants(base: Mapping[str, Any], changed: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {label: {**base, **changes} for label, changes in changed.items()}


SWEEPS = {
    "shape": Sweep(
        "Which depth, width, vocabulary, batch and chunk are best in the time of 320 steps at 4 x 128?",
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
                    "2 x 128, 1024 a step": {"batch.tokens_per_step": 1024, "batch.sequence_tokens": 1024},
                    "2 x 128, 4096 a step": {"batch.tokens_per_step": 4096, "batch.sequence_tokens": 4096},
                    "2 x 128, vocabulary 8192": {"model.vocab_size": 8192},
                    "2 x 128, chunk 128": {"data.chunk_tokens": 128},
                },
            ),
        },
    ),
    "nano": Sweep(
        "How wide are four layers best, in the time of 320 steps of `softcap` at 128?",
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
        "Narrower than 128 won: how narrow, when the lap takes a minute on two cores?",
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
        "What does each ingredient change, alone, at 2 x 96?",
        "softcap",
        "nano",
        seeds=3,
        by_time=False,
        variants=_variants(
            {**SHORT, "model.width": 96, "schedule.steps": 300},
            {
                "base": {},
                "polar express": {"optim.muon.coefficients": "polar-express"},
                "polar express, 4 steps": {
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
        "On top of what paid: what else does, in equal time?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            {**SHORT, **PAID, "model.width": 96, "schedule.steps": 300},
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
        "A smaller hidden width won: how small, and does the time saved buy a third layer?",
        "softcap",
        "nano",
        seeds=3,
        by_time=True,
        variants=_variants(
            {**SHORT, **PAID, "model.width": 96, "model.mlp_ratio": 2, "schedule.steps": 340},
            {
                "2 x 96, hidden 2 x width": {},
                "2 x 96, hidden 1 x width": {"model.mlp_ratio": 1},
                "3 x 96, hidden 2 x width": {"model.num_layers": 3, "model.values": "per-layer"},
            },
        ),
    ),
    "longer": Sweep(
        "Is the smallest hidden width still the best in a lap of a minute and a half?",
        "softcap",
        "nano",
        seeds=1,
        by_time=True,
        variants=_variants(
            {**SHORT, **PAID, "model.width": 96, "schedule.steps": 1000},
            {
                "hidden 2 x width": {"model.mlp_ratio": 2},
                "hidden 1 x width": {"model.mlp_ratio": 1},
            },
        ),
    ),
    "bigrams": Sweep(
        "How many rows should a table of token pairs have, in equal time?",
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
        "With a table of pairs: is the rest still right, in equal time?",
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
        "With a table of pairs less width won in a short lap: also in the time of a whole one?",
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
        "Which optimizer should the table of pairs have, in equal time?",
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
        "What the sweeps before took as given: does it hold on the tuning split?",
        "sprint",
        "nano",
        seeds=3,
        by_time=False,
        variants=_variants(
            {"schedule.steps": 340},
            {
                "base": {},
                "Adam's second decay 0.95": {"optim.adam.beta2": 0.95},
                "Adam's second decay 0.99": {"optim.adam.beta2": 0.99},
                "tokens in their order": {"data.order": "stream"},
            },
        ),
    ),
    "pico": Sweep(
        "Does what was found at nano also win at pico, in equal time?",
        "softcap",
        "pico",
        seeds=3,
        by_time=True,
        variants={
            "softcap": {},
            "sprint": {**SHORT, **PAID, "model.mlp_ratio": 1, "model.bigram_rows": 32_768},
        },
    ),
}
