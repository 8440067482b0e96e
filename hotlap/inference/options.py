"""Sampling options, checked at construction. Does not import torch, so that `--help` is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotlap.errors import ConfigError


@dataclass(frozen=True)
class SampleOptions:
    max_tokens: int = 200  # per sample; it may end earlier
    num_samples: int = 1  # per prompt
    temperature: float = 0.8  # 0: greedy
    top_k: int | None = None  # sample from the k most likely tokens
    top_p: float | None = None  # sample from the most likely tokens whose probabilities sum to top_p
    seed: int = 0

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature)
        _require(self.max_tokens >= 1, "at least 1 token", self.max_tokens)
        _require(self.num_samples >= 1, "at least 1 sample", self.num_samples)
        _require(finite and self.temperature >= 0, "a temperature of at least 0", self.temperature)
        _require(self.top_k is None or self.top_k >= 1, "top-k of at least 1, or none", self.top_k)
        _require(self.top_p is None or 0 < self.top_p <= 1, "top-p in (0, 1], or none", self.top_p)
        _require(self.seed >= 0, "a seed of at least 0", self.seed)


def _require(condition: bool, expected: str, found: float | None) -> None:
    if not condition:
        raise ConfigError(expected=expected, found=str(found), do="change the value")
