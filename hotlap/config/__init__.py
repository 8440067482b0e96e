"""The configuration of a run. Each setting is declared once, with a type, a default and a one-line doc.

The defaults are what the published speedrun records (https://github.com/KellerJordan/modded-nanogpt) have in
common; a recipe overrides the rest. Values that are invalid on any machine and with any data raise a
`ConfigError` when the dataclass is constructed. `hotlap.settings` derives the command-line options,
`config.json` and the diff of two configurations from these declarations.

This file defines `Config` and the checks that span sections. The sections are in the files next to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotlap.config.checks import require
from hotlap.config.model import AttentionConfig, ModelConfig
from hotlap.config.optimization import AdamConfig, BatchConfig, MuonConfig, OptimConfig, ScheduleConfig
from hotlap.config.run import CheckpointConfig, DataConfig, EvaluationConfig, RuntimeConfig
from hotlap.settings import section, setting

__all__ = [
    "AdamConfig",
    "AttentionConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimConfig",
    "RuntimeConfig",
    "ScheduleConfig",
]


@dataclass(frozen=True)
class Config:
    recipe: str = setting("", "name of the recipe")
    ideas: tuple[str, ...] = setting((), "idea files on top of the recipe's parent, each as NAME@hash")
    size: str = setting("small", "name of the size")
    seed: int = setting(0, "seed of the initialization and the data order")
    model: ModelConfig = section(ModelConfig, "the model")
    attention: AttentionConfig = section(AttentionConfig, "attention")
    optim: OptimConfig = section(OptimConfig, "optimizers")
    schedule: ScheduleConfig = section(ScheduleConfig, "schedules")
    batch: BatchConfig = section(BatchConfig, "batches")
    data: DataConfig = section(DataConfig, "data")
    evaluation: EvaluationConfig = section(EvaluationConfig, "validation")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "checkpoints")
    runtime: RuntimeConfig = section(RuntimeConfig, "machine")

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "`seed` in [0, 2**63)", str(self.seed), "choose another seed")
        block, sequence = self.attention.block_size, self.batch.sequence_tokens
        for name, tokens in (
            ("sequence_tokens", sequence),
            ("validation_sequence_tokens", self.validation_sequence_tokens),
        ):
            require(
                tokens % block == 0,
                f"{name} as a multiple of block_size = {block}",
                str(tokens),
                f"use {max(1, tokens // block) * block}",
            )
        if self.data.order == "shuffled":
            require(
                sequence % self.data.chunk_tokens == 0,
                "sequence_tokens as a multiple of chunk_tokens",
                f"{sequence} and {self.data.chunk_tokens}",
                "change data.chunk_tokens",
            )
            require(
                self.data.tail == "carry",
                "data.tail carry with data.order shuffled, which leaves no tail at the end of a shard",
                self.data.tail,
                "use --tail carry",
            )
        is_gpt2, unlimited = self.model.architecture == "gpt2", self.attention.window_unit == "unlimited"
        require(
            is_gpt2 == unlimited and not (is_gpt2 and self.attention.document_mask),
            "window_unit unlimited and no document mask for gpt2, any other window_unit for speedrun",
            f"{self.model.architecture}, window_unit {self.attention.window_unit},"
            f" document_mask {str(self.attention.document_mask).lower()}",
            "change model.architecture or the attention settings",
        )
        require(
            self.runtime.reduction != "fixed" or self.batch.micro_sequences == 1,
            "batch.micro_sequences of 1 with runtime.reduction fixed, which takes sequences one by one",
            str(self.batch.micro_sequences),
            "add --micro-sequences 1",
        )
        require(
            self.runtime.reduction != "fixed" or not self.model.dropout,
            "model.dropout of 0 with runtime.reduction fixed: what is dropped depends on the threads",
            str(self.model.dropout),
            "leave one out",
        )
        if self.attention.window_unit == "blocks":
            require(
                self.schedule.window_multiple_tokens == block,
                f"window_multiple_tokens equal to block_size = {block} when window_unit is blocks",
                str(self.schedule.window_multiple_tokens),
                "change schedule.window_multiple_tokens or attention.window_unit",
            )
        require(
            not is_gpt2 or self.validation_sequence_tokens <= sequence,
            f"validation_sequence_tokens of at most {sequence} for gpt2, which learns no position beyond",
            str(self.validation_sequence_tokens),
            "validate on sequences as long as those of training, or on shorter ones",
        )

    @property
    def validation_sequence_tokens(self) -> int:
        """Tokens per packed validation sequence."""
        return self.evaluation.validation_sequence_tokens or self.batch.sequence_tokens
