"""The recipes. Each is its parent with a few settings changed, at the scale of the published records.

`Record` holds the published result of a record of the modded-nanogpt speedrun
(https://github.com/KellerJordan/modded-nanogpt): 8×H100, FineWeb, to a validation loss of 3.28. These are
not Hotlap's own measurements. Two recipes have no record: `adamw`, the baseline after nanoGPT
(https://github.com/karpathy/nanoGPT), and `sprint`, which continues from the last record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotlap.config import Config
from hotlap.settings import updated

if TYPE_CHECKING:
    from hotlap.recipes.idea_files import IdeaFile


@dataclass(frozen=True)
class Record:
    """A published run on 8×H100 to the target loss."""

    date: str
    minutes: float
    val_loss: float | None  # None: unknown


@dataclass(frozen=True)
class Recipe:
    name: str
    parent: str | None
    summary: str
    source: str
    record: Record | None
    config: Config
    at_size: Mapping[str, Mapping[str, Any]]  # {size: changes applied after the size's own}
    changes: Mapping[str, Any] = field(default_factory=dict)  # at every size, after those
    ideas: tuple[IdeaFile, ...] = ()


RECIPES: dict[str, Recipe] = {}

_SPEEDRUN = "modded-nanogpt speedrun record of {date}"


def _add(
    name: str,
    parent: str | None,
    summary: str,
    record: Record | None,
    changes: Mapping[str, Any],
    source: str = "",
    at_size: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    base = RECIPES[parent].config if parent else Config()
    config = updated(base, {**changes, "recipe": name})
    if record and not source:
        source = _SPEEDRUN.format(date=record.date)
    RECIPES[name] = Recipe(name, parent, summary, source, record, config, at_size or {})


# The window has its full width from the start. With two layers, a smaller window gains nothing.
_TWO_LAYERS = {
    "model.num_layers": 2,
    "model.mlp_ratio": 1,
    "model.values": "mirrored",
    "model.bigram_rows": 32_768,
    "model.drop_attention": False,
    "schedule.window_start_tokens": 256,
    "schedule.window_end_tokens": 256,
}

# On the records' 8 GPUs such a run takes minutes. With fewer it takes long enough to lose something, so it
# saves by the clock as every other run does.
_NO_CHECKPOINTS_DURING_A_RECORD = {"small": {"checkpoint.end_only_from_ranks": 8}}

_add(
    "adamw",
    None,
    "GPT-2 with nanoGPT's settings: AdamW, learned positions, full causal attention, cosine schedule",
    None,
    {
        "model.architecture": "gpt2",
        "model.num_heads": 12,
        "model.softcap": 0.0,
        "model.values": "plain",
        "attention.window_unit": "unlimited",
        "attention.document_mask": False,
        "optim.matrices": "adamw",
        "optim.clip_norm": 1.0,
        "optim.adam.embed_lr": 6e-4,
        "optim.adam.head_lr": 6e-4,
        "optim.adam.scalar_lr": 6e-4,
        "optim.adam.beta1": 0.9,
        "optim.adam.weight_decay": 0.1,
        # One epoch of FineWeb's 10B-token sample.
        "schedule.steps": 19_073,
        "schedule.kind": "cosine",
        "schedule.warmup_steps": 700,
        "schedule.final_lr_fraction": 0.1,
        "batch.sequence_tokens": 1024,
        "batch.micro_sequences": 16,
        "data.chunk_tokens": 1024,
    },
    source="nanoGPT's GPT-2 124M settings",
)

_add(
    "flex-attention",
    None,
    "one packed sequence per device, attention limited to the document and a fixed window of 1024 tokens",
    Record("2024-11-19", 5.03, None),
    {
        "optim.muon.lr": 0.04,
        "optim.muon.momentum_warmup_steps": 500,
        "optim.adam.beta1": 0.9,
        "schedule.steps": 1875,
        "schedule.cooldown_steps": 562,
        "schedule.window_start_tokens": 1024,
        "schedule.window_end_tokens": 1024,
    },
)

_add(
    "window-warmup",
    "flex-attention",
    "the attention window grows over training",
    Record("2024-11-24", 4.66, 3.2759),
    {
        "optim.muon.lr": 0.05,
        "optim.muon.momentum_warmup_steps": 300,
        "optim.adam.beta1": 0.8,
        "optim.clip_norm": 1.0,
        "schedule.steps": 1750,
        "schedule.cooldown_steps": 640,
        "schedule.window_start_tokens": 64,
        "schedule.window_end_tokens": 1792,
    },
)

_add(
    "value-embeds",
    "window-warmup",
    "each layer mixes its own value embedding into v",
    Record("2024-12-04", 4.41, None),
    {
        "model.values": "per-layer",
        "schedule.steps": 1530,
        "schedule.cooldown_steps": 600,
    },
)

_add(
    "unet-value-embeds",
    "value-embeds",
    "value embeddings mirrored over the U-Net; asynchronous Muon; mask built from blocks",
    Record("2024-12-08", 3.95, 3.2773),
    {
        "model.values": "mirrored",
        "model.value_mix": "pair",
        "attention.window_unit": "tokens-and-blocks",
        "optim.clip_norm": 0.0,
        "optim.muon.momentum_form": "lerp",
        "optim.muon.communication": "overlapped",
        "schedule.steps": 1480,
        # From here on the records' loaders advance to the next shard when a whole global batch no longer
        # fits. Of the loaders before no such rule is known, so these recipes carry the rest of a shard on.
        "data.tail": "drop",
    },
)

_add(
    "block-window",
    "unet-value-embeds",
    "window in blocks, full blocks listed separately from partial ones, separate value tables",
    Record("2024-12-10", 3.80, 3.2756),
    {
        "model.value_tables": "separate",
        "attention.window_unit": "blocks",
        "schedule.window_offset_tokens": 64,
        "schedule.window_multiple_tokens": 128,
    },
)

_add(
    "sparse-value-embeds",
    "block-window",
    "value tables in the outer layers only; one layer without attention; half-truncated rotary",
    Record("2024-12-17", 3.57, 3.2794),
    {
        "model.values": "outer",
        "model.drop_attention": True,
        "model.rotary": "half",
        "model.rotary_base": 1024.0,
        "schedule.steps": 1490,
    },
    at_size=_NO_CHECKPOINTS_DURING_A_RECORD,
)

_add(
    "softcap",
    "sparse-value-embeds",
    "logit softcap 30 → 15; cooldown as a fraction; embeddings in bfloat16",
    Record("2025-01-04", 3.40, 3.2785),
    {
        "model.softcap": 15.0,
        "model.bf16_embeddings": True,
        "schedule.steps": 1390,
        "schedule.cooldown_steps": 0,
        "schedule.cooldown_fraction": 0.4,
        "schedule.window_start_tokens": 128,
        "schedule.window_end_tokens": 1856,
        "schedule.window_offset_tokens": 0,
        "runtime.coordinate_descent": True,
    },
    at_size=_NO_CHECKPOINTS_DURING_A_RECORD,
)

_add(
    "sprint",
    "softcap",
    "the fastest lap on a CPU: a shallow, narrow model with bigram embeddings, tuned for runs of minutes",
    None,
    {
        "model.rotary": "full",
        "optim.muon.lr": 0.04,
        # Four iterations with these coefficients reach the same loss as five with the default ones.
        "optim.muon.coefficients": "polar-express",
        "optim.muon.newton_schulz_steps": 4,
        "optim.muon.weight_decay": 0.1,
        "optim.muon.cautious_weight_decay": True,
        "optim.pairs": "row-rms",
        "optim.adam.head_lr": 0.016,
        "optim.adam.beta2": 0.98,
        "schedule.cooldown_fraction": 0.6,
    },
    source="tuned by sweeps at nano (docs/benchmarks.md); not tested at small and medium",
    at_size={
        "nano": {**_TWO_LAYERS, "schedule.steps": 1300},
        "pico": {**_TWO_LAYERS, "schedule.steps": 150},
    },
)
