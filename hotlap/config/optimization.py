"""Settings of the optimizers, the schedules and the batch size.

Muon: https://kellerjordan.github.io/posts/muon/. The `polar-express` coefficients:
https://arxiv.org/abs/2505.16932.
"""

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
    momentum_end: float = setting(0.95, "momentum after its warmup")
    momentum_warmup_steps: int = setting(300, "steps of linear momentum warmup")
    momentum_form: Literal["sum", "lerp"] = setting(
        "sum", "buffer = μ·buffer + g, or buffer = lerp(buffer, g, 1−μ)"
    )
    nesterov: bool = setting(True, "use Nesterov momentum")
    newton_schulz_steps: int = setting(5, "Newton-Schulz iterations per update")
    coefficients: Literal["quintic", "polar-express"] = setting(
        "quintic", "Newton-Schulz coefficients: the same for every iteration, or one triple per iteration"
    )
    update_scale: Literal["aspect", "match-rms"] = setting(
        "aspect", "scale updates by max(1, rows/cols)^0.5, or by 0.2·max(rows, cols)^0.5 to match Adam's RMS"
    )
    weight_decay: float = setting(0.0, "decoupled weight decay, multiplied by the learning rate")
    cautious_weight_decay: bool = setting(False, "decay only where update and weight have the same sign")
    communication: Literal["overlapped", "flat"] = setting(
        "flat", "asynchronous all-gather per chunk, or one all-reduce of all updates"
    )
    lr_factors: dict[str, float] = setting(
        {}, "learning-rate multipliers, applied to parameters whose name contains the key"
    )

    def __post_init__(self) -> None:
        require_positive(self, "lr", "newton_schulz_steps")
        require_decay(self, "momentum_start", "momentum_end")
        require_not_negative(self, "momentum_warmup_steps", "weight_decay")
        for name, factor in self.lr_factors.items():
            require(
                math.isfinite(factor) and factor >= 0,
                "`lr_factors` of at least 0",
                f"{name}={factor}",
                "give 0 or more",
            )


@dataclass(frozen=True)
class AdamConfig:
    embed_lr: float = setting(0.6, "learning rate of token, bigram and value embeddings")
    head_lr: float = setting(0.008, "learning rate of the lm head")
    scalar_lr: float = setting(0.04, "learning rate of mixing weights and norm gains")
    matrix_lr: float = setting(0.0006, "learning rate of the matrices when optim.matrices is adamw")
    beta1: float = setting(0.8, "decay of the first moment")
    beta2: float = setting(0.95, "decay of the second moment")
    eps: float = setting(1e-8, "added to the square root of the second moment")
    weight_decay: float = setting(0.0, "decoupled weight decay on parameters with two or more dimensions")

    def __post_init__(self) -> None:
        require_positive(self, "embed_lr", "head_lr", "scalar_lr", "matrix_lr", "eps")
        require_decay(self, "beta1", "beta2")
        require_not_negative(self, "weight_decay")


@dataclass(frozen=True)
class OptimConfig:
    matrices: Literal["muon", "adamw"] = setting("muon", "optimizer of the matrices inside the blocks")
    pairs: Literal["adam", "row-rms"] = setting(
        "adam", "optimizer of the bigram table; row-rms updates only the rows that have a gradient"
    )
    clip_norm: float = setting(0.0, "clip the global gradient norm to this; 0: no clipping")
    muon: MuonConfig = section(MuonConfig, "Muon")
    adam: AdamConfig = section(AdamConfig, "Adam")

    def __post_init__(self) -> None:
        require_not_negative(self, "clip_norm")


@dataclass(frozen=True)
class ScheduleConfig:
    steps: int = setting(1750, "optimizer steps of the run")
    minutes: float = setting(
        0.0, "change the number of steps on the way so that the command ends after this time; 0: leave it"
    )
    kind: Literal["trapezoid", "triangular", "cosine"] = setting(
        "trapezoid",
        "learning rate: constant then linear decay to 0; linear warmup then linear decay; or cosine",
    )
    warmup_steps: int = setting(0, "steps of linear learning-rate warmup")
    cooldown_steps: int = setting(0, "trapezoid: steps of linear decay at the end")
    cooldown_fraction: float = setting(0.0, "trapezoid: linear decay at the end, as a fraction of the steps")
    final_lr_fraction: float = setting(0.0, "cosine: final learning rate, as a fraction of the peak")
    window_start_tokens: int = setting(64, "attention window at step 0, before rounding")
    window_end_tokens: int = setting(1792, "attention window at the last step, before rounding")
    window_offset_tokens: int = setting(0, "added to the window before it is rounded down")
    window_multiple_tokens: int = setting(64, "the window is rounded down to a multiple of this")

    def __post_init__(self) -> None:
        require_positive(self, "steps", "window_start_tokens", "window_end_tokens", "window_multiple_tokens")
        require_not_negative(self, "minutes", "warmup_steps", "cooldown_steps", "window_offset_tokens")
        require_fraction(self, "cooldown_fraction", "final_lr_fraction")
        require(
            not (self.cooldown_steps and self.cooldown_fraction),
            "the cooldown in steps or as a fraction",
            f"both ({self.cooldown_steps} steps, {self.cooldown_fraction})",
            "set one of them to 0",
        )
        require(
            self.warmup_steps + self.cooldown_steps <= self.steps,
            "warmup and cooldown that fit in the run",
            f"{self.warmup_steps} + {self.cooldown_steps} of {self.steps} steps",
            "shorten them or train for more steps",
        )
        # isclose: a sum of exactly 1 must not be rejected because of floating-point rounding.
        fraction = self.warmup_steps / self.steps + self.cooldown_fraction
        require(
            fraction <= 1 or math.isclose(fraction, 1),
            "warmup and cooldown that fit in the run",
            f"{self.warmup_steps} steps + {self.cooldown_fraction:g} of {self.steps} steps",
            "shorten them or train for more steps",
        )
        smallest = min(self.window_start_tokens, self.window_end_tokens) + self.window_offset_tokens
        require(
            smallest >= self.window_multiple_tokens,
            f"a window of at least window_multiple_tokens = {self.window_multiple_tokens}",
            f"{smallest}",
            "use a larger window or a smaller window_multiple_tokens",
        )


@dataclass(frozen=True)
class BatchConfig:
    tokens_per_step: int = setting(524_288, "tokens per optimizer step, over all devices")
    sequence_tokens: int = setting(65_536, "tokens per packed sequence")
    micro_sequences: int = setting(1, "sequences per micro-batch on each device")

    def __post_init__(self) -> None:
        require_positive(self, "tokens_per_step", "sequence_tokens", "micro_sequences")
        sequences = max(1, self.tokens_per_step // self.sequence_tokens)
        require(
            self.tokens_per_step % self.sequence_tokens == 0,
            "tokens_per_step as a multiple of sequence_tokens",
            f"{self.tokens_per_step} and {self.sequence_tokens}",
            f"use {sequences * self.sequence_tokens} tokens per step",
        )
