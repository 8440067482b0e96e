"""Sizes: the model dimensions, data and number of steps at which a recipe runs.

A size sets dimensions, sequence length, batch, steps and tokenizer. The rest of the recipe is scaled to
match: step counts stay the same fraction of the run, the window shrinks to the size's, and AdamW's learning
rates are inversely proportional to the width. `small` runs a recipe exactly as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotlap.config import Config
from hotlap.settings import updated

# The largest window of the published schedules. A size with a smaller one subtracts the difference.
RECORD_WINDOW_TOKENS = 1792


@dataclass(frozen=True)
class Size:
    name: str
    purpose: str
    num_layers: int
    width: int
    num_heads: int
    sequence_tokens: int
    window_tokens: int = RECORD_WINDOW_TOKENS
    steps: int | None = None  # None: the recipe's
    changes: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, recipe: Config) -> Config:
        changes = {
            "model.num_layers": self.num_layers,
            "model.width": self.width,
            "model.num_heads": self._heads(recipe),
            **self._sequence(recipe),
            **self._window(recipe),
            **self._step_counts(recipe),
            **self._adamw_lrs(recipe),
            **self.changes,
        }
        return updated(recipe, changes)

    def _heads(self, recipe: Config) -> int:
        # GPT-2 uses twice as many heads as the records at the same width. Keep the recipe's ratio.
        return max(1, self.num_heads * recipe.model.num_heads // 6)

    def _sequence(self, recipe: Config) -> dict[str, int]:
        sequence = min(self.sequence_tokens, recipe.batch.sequence_tokens)
        if recipe.attention.document_mask:
            return {"batch.sequence_tokens": sequence}
        # Without a document mask, chunks in one sequence would attend to each other: one chunk per sequence.
        return {"batch.sequence_tokens": sequence, "data.chunk_tokens": sequence}

    def _window(self, recipe: Config) -> dict[str, int]:
        schedule = recipe.schedule
        if schedule.window_start_tokens == schedule.window_end_tokens:
            fixed = min(schedule.window_end_tokens, self.window_tokens)
            return {"schedule.window_start_tokens": fixed, "schedule.window_end_tokens": fixed}
        narrower_by = RECORD_WINDOW_TOKENS - self.window_tokens
        return {"schedule.window_end_tokens": schedule.window_end_tokens - narrower_by}

    def _step_counts(self, recipe: Config) -> dict[str, int]:
        if self.steps is None:
            return {}
        factor = self.steps / recipe.schedule.steps
        return {
            "schedule.steps": self.steps,
            "schedule.warmup_steps": round(recipe.schedule.warmup_steps * factor),
            "schedule.cooldown_steps": round(recipe.schedule.cooldown_steps * factor),
            "optim.muon.momentum_warmup_steps": round(recipe.optim.muon.momentum_warmup_steps * factor),
        }

    def _adamw_lrs(self, recipe: Config) -> dict[str, float]:
        if recipe.optim.matrices != "adamw":
            return {}
        factor = recipe.model.width / self.width
        adam = recipe.optim.adam
        return {
            "optim.adam.embed_lr": adam.embed_lr * factor,
            "optim.adam.head_lr": adam.head_lr * factor,
            "optim.adam.scalar_lr": adam.scalar_lr * factor,
            "optim.adam.matrix_lr": adam.matrix_lr * factor,
        }


# Shuffled chunks, which leave no tail: a corpus of one shard would lose much of itself to the records' rule.
_SMALL_CORPUS = {
    "data.source": "sotu",
    "data.tokenizer": "bpe",
    "data.order": "shuffled",
    "data.tail": "carry",
}

SIZES = {
    size.name: size
    for size in (
        Size(
            "pico",
            "tests, seconds",
            num_layers=4,
            width=64,
            num_heads=2,
            sequence_tokens=512,
            window_tokens=256,
            steps=100,
            changes={
                **_SMALL_CORPUS,
                "model.vocab_size": 512,
                "batch.tokens_per_step": 2048,
                "evaluation.every_steps": 25,
                "evaluation.tokens": 16_384,
            },
        ),
        Size(
            "nano",
            "a lap in a few minutes on two CPU cores",
            num_layers=4,
            width=96,
            num_heads=2,
            sequence_tokens=2048,
            window_tokens=256,
            steps=640,
            changes={
                **_SMALL_CORPUS,
                "model.vocab_size": 4096,
                "batch.tokens_per_step": 2048,
                "evaluation.every_steps": 160,
                "evaluation.tokens": None,
                "evaluation.share": 0.1,
            },
        ),
        Size(
            "micro",
            "ten times nano's compute, for ladders on a CPU",
            num_layers=6,
            width=192,
            num_heads=3,
            sequence_tokens=2048,
            window_tokens=512,
            steps=800,
            changes={
                **_SMALL_CORPUS,
                "model.vocab_size": 4096,
                "batch.tokens_per_step": 4096,
                "evaluation.every_steps": 200,
                "evaluation.tokens": None,
            },
        ),
        Size("small", "the records", num_layers=12, width=768, num_heads=6, sequence_tokens=65_536),
        Size("medium", "350M class", num_layers=16, width=1024, num_heads=8, sequence_tokens=65_536),
    )
}
