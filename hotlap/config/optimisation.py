"""What a step does to the weights: the optimizers, their schedules, the tokens of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hotlap.config.checks import (
    require,
    require_decay,
    require_fraction,
    require_not_negative,
    require_positive,
)
from hotlap.settings import section, setting


@dataclass(frozen=True)
class MuonConfig:
    lr: float = setting(0.05, "learning rate of the matrices inside the blocks")
    momentum_start: float = setting(0.85, "momentum at step 0")
    momentum_end: float = setting(0.95, "momentum after its warm-up")
    momentum_warmup_steps: int = setting(300, "steps from the first momentum to the last")
    momentum_form: Literal["sum", "lerp"] = setting(
        "sum", "buffer = μ·buffer + g, or buffer lerps towards g by 1−μ"
    )
    nesterov: bool = setting(True, "look ahead along the momentum")
    newton_schulz_steps: int = setting(5, "iterations of the orthogonalisation")
    coefficients: Literal["quintic", "polar-express"] = setting(
        "quintic", "fixed (3.4445, −4.7750, 2.0315), or one triple a step"
    )
    update_scale: Literal["aspect", "match-rms"] = setting(
        "aspect", "update × max(1, rows/cols)^0.5, or × 0.2·max(rows, cols)^0.5 to match Adam's RMS"
    )
    weight_decay: float = setting(0.0, "decoupled weight decay, times the learning rate")
    cautious_weight_decay: bool = setting(False, "decay only where update and weight have the same sign")
    communication: Literal["overlapped", "flat"] = setting(
        "flat", "async all-gather a chunk at a time, or one all-reduce of all updates"
    )
    lr_factors: dict[str, float] = setting(
        {}, "factor on the learning rate of parameters whose name contains a key"
    )

    def __post_init__(self) -> None:
        require_positive(self, "lr", "newton_schulz_steps")
        require_decay(self, "momentum_start", "momentum_end")
        require_not_negative(self, "momentum_warmup_steps", "weight_decay")
        for name, factor in self.lr_factors.items():
            require(
                math.isfinite(factor) and factor >= 0,
                "`lr_factors` of 0 or more",
                f"{name}={factor}",
                "give such numbers",
            )


@dataclass(frozen=True)
class AdamConfig:
    embed_lr: float = setting(0.6, "learning rate of token, pair and value embeddings")
    head_lr: float = setting(0.008, "learning rate of the output layer")
    scalar_lr: float = setting(0.04, "learning rate of mixing weights and norm gains")
    matrix_lr: float = setting(0.0006, "learning rate of matrices when optim.matrices is adamw")
    beta1: float = setting(0.8, "decay of the first moment")
    beta2: float = setting(0.95, "decay of the second moment")
    eps: float = setting(1e-8, "added to the root of the second moment")
    weight_decay: float = setting(0.0, "decoupled weight decay on tensors of two or more dimensions")

    def __post_init__(self) -> None:
        require_positive(self, "embed_lr", "head_lr", "scalar_lr", "matrix_lr", "eps")
        require_decay(self, "beta1", "beta2")
        require_not_negative(self, "weight_decay")


@dataclass(frozen=True)
class OptimConfig:
    matrices: Literal["muon", "adamw"] = setting(
        "muon", "which optimizer takes the matrices inside the blocks"
    )
    pairs: Literal["adam", "row-rms"] = setting(
        "adam", "which optimizer takes the table of token pairs; row-rms leaves rows without a gradient alone"
    )
    clip_norm: float = setting(0.0, "global gradient norm is clipped to this; 0 does not clip")
    muon: MuonConfig = section(MuonConfig, "Muon")
    adam: AdamConfig = section(AdamConfig, "Adam")

    def __post_init__(self) -> None:
        require_not_negative(self, "clip_norm")


@dataclass(frozen=True)
class ScheduleConfig:
    steps: int = setting(1750, "optimizer steps of the run")
    kind: Literal["trapezoid", "triangular", "cosine"] = setting(
        "trapezoid", "learning rate: constant then linear to 0; up and straight down; or cosine"
    )
    warmup_steps: int = setting(0, "steps over which the learning rate rises")
    cooldown_steps: int = setting(0, "steps over which it falls at the end (trapezoid), as a number")
    cooldown_fraction: float = setting(0.0, "steps over which it falls at the end (trapezoid), as a share")
    final_lr_fraction: float = setting(0.0, "learning rate at the end of a cosine, over the peak")
    window_start_tokens: int = setting(64, "attention window at step 0, before rounding")
    window_end_tokens: int = setting(1792, "attention window at the last step, before rounding")
    window_offset_tokens: int = setting(0, "added before the window is rounded down")
    window_multiple_tokens: int = setting(64, "the window is rounded down to a multiple of this")

    def __post_init__(self) -> None:
        require_positive(self, "steps", "window_start_tokens", "window_end_tokens", "window_multiple_tokens")
        require_not_negative(self, "warmup_steps", "cooldown_steps", "window_offset_tokens")
        require_fraction(self, "cooldown_fraction", "final_lr_fraction")
        require(
            not (self.cooldown_steps and self.cooldown_fraction),
            "the cooldown in steps or as a fraction",
            f"both ({self.cooldown_steps} steps, {self.cooldown_fraction})",
            "set one of them to 0",
        )
        require(
            self.warmup_steps + self.cooldown_steps <= self.steps,
            "warm-up and cooldown within the steps",
            f"{self.warmup_steps} + {self.cooldown_steps} of {self.steps} steps",
            "shorten them or train for more steps",
        )
        # Rounding alone must not refuse what fills the run exactly.
        share = self.warmup_steps / self.steps + self.cooldown_fraction
        require(
            share <= 1 or math.isclose(share, 1),
            "warm-up and cooldown within the steps",
            f"{self.warmup_steps} steps + {self.cooldown_fraction:g} of {self.steps} steps",
            "shorten them or train for more steps",
        )
        smallest = min(self.window_start_tokens, self.window_end_tokens) + self.window_offset_tokens
        require(
            smallest >= self.window_multiple_tokens,
            f"a window of at least window_multiple_tokens = {self.window_multiple_tokens}",
            f"{smallest}",
            "widen the window or round it to a smaller multiple",
        )


@dataclass(frozen=True)
class BatchConfig:
    tokens_per_step: int = setting(524_288, "tokens of one optimizer step, over all devices")
    sequence_tokens: int = setting(65_536, "tokens of one packed sequence")
    micro_sequences: int = setting(1, "sequences that a device takes through the model at once")

    def __post_init__(self) -> None:
        require_positive(self, "tokens_per_step", "sequence_tokens", "micro_sequences")
        sequences = max(1, self.tokens_per_step // self.sequence_tokens)
        require(
            self.tokens_per_step % self.sequence_tokens == 0,
            "tokens_per_step as a multiple of sequence_tokens",
            f"{self.tokens_per_step} and {self.sequence_tokens}",
            f"use {sequences * self.sequence_tokens} tokens a step",
        )
