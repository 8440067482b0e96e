"""What can be asked of sampling, checked when asked. Needs no torch, so that a command's help is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotlap.errors import ConfigError


@dataclass(frozen=True)
class SampleOptions:
    max_tokens: int = 200  # of one sample, which may end sooner
    num_samples: int = 1  # of one prompt
    temperature: float = 0.8  # 0 always takes the likeliest token
    top_k: int | None = None  # choose among the k likeliest
    top_p: float | None = None  # choose among the likeliest that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature)
        _require(self.max_tokens >= 1, "1 or more tokens", self.max_tokens)
        _require(self.num_samples >= 1, "1 or more samples", self.num_samples)
        _require(finite and self.temperature >= 0, "a temperature of 0 or more", self.temperature)
        _require(self.top_k is None or self.top_k >= 1, "a top-k of 1 or more, or none", self.top_k)
        _require(
            self.top_p is None or 0 < self.top_p <= 1, "a top-p above 0 and up to 1, or none", self.top_p
        )
        _require(self.seed >= 0, "a seed of 0 or more", self.seed)


def _require(condition: bool, expected: str, found: float | None) -> None:
    if not condition:
        raise ConfigError(expected=expected, found=str(found), do="change the value")
