"""Which token comes next: temperature, top-k and top-p over the logits, then one draw a sample.

A draw is a function of the logits and of one uniform number, taken on the CPU in float64, so that the same
seed gives the same text on every device and for any number of samples side by side.

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotlap.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen; a temperature of 0 always takes the likeliest."""

    temperature: float = 0.8
    top_k: int | None = None  # only the k likeliest
    top_p: float | None = None  # only the likeliest that together have this probability

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                expected="a temperature of 0 or more",
                found=f"{self.temperature}",
                do="use 0 for the likeliest",
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                expected="a top-k of 1 or more", found=f"{self.top_k}", do="leave it out to allow every token"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(
                expected="a top-p above 0 and up to 1",
                found=f"{self.top_p}",
                do="leave it out to allow every token",
            )


class Draws:
    """Uniform numbers in [0, 1), one a sample and step. Each sample has a sequence of its own."""

    def __init__(self, seed: int, num_samples: int) -> None:
        if seed < 0:
            raise ConfigError(expected="a seed of 0 or more", found=f"{seed}", do="remove the minus sign")
        self._generators = [np.random.default_rng([seed, sample]) for sample in range(num_samples)]

    def next(self) -> Tensor:
        """(S,) float64"""
        return torch.tensor([generator.random() for generator in self._generators], dtype=torch.float64)


def choose(logits_SV: Tensor, choice: Choice, uniform_S: Tensor) -> Tensor:
    """(S,) int64 on the CPU: for each sample, the token at which the kept probability first exceeds its draw.

    Tokens are laid out from the likeliest down, equals in order of their ids.
    """
    logits = logits_SV.cpu().double()
    if choice.temperature == 0:
        return logits.argmax(dim=-1)
    scaled, tokens_SV = logits.sort(dim=-1, descending=True, stable=True)
    # Relative to the largest, so that a temperature near 0 does not overflow.
    probabilities = ((scaled - scaled[:, :1]) / choice.temperature).softmax(dim=-1)
    if choice.top_k is not None:
        probabilities = probabilities[:, : choice.top_k]
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    reached = probabilities.cumsum(dim=-1)
    if choice.top_p is not None:
        # Kept while those before are not yet enough, so that the likeliest always is.
        probabilities = probabilities.where(reached - probabilities < choice.top_p, 0.0)
        reached = probabilities.cumsum(dim=-1)
    picked = torch.searchsorted(reached, uniform_S[:, None] * reached[:, -1:], right=True)
    last_kept = (probabilities > 0).sum(dim=-1, keepdim=True) - 1  # should rounding lift a draw to the total
    return tokens_SV.gather(1, torch.minimum(picked, last_kept))[:, 0]
