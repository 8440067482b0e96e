"""Sample the next token: apply temperature, top-k and top-p to the logits, then draw one token per sample.

A draw depends only on the logits and one uniform number. It is computed on the CPU in float64, so that the
same seed gives the same text on every device and with any number of samples.

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotlap.errors import CheckpointError
from hotlap.inference.options import SampleOptions


class Draws:
    """Uniform numbers in [0, 1), one per sample and step. Each sample has its own generator."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self._generators = [np.random.default_rng([seed, sample]) for sample in range(num_samples)]

    def next(self) -> Tensor:
        """(S,) float64"""
        return torch.tensor([generator.random() for generator in self._generators], dtype=torch.float64)


def choose(logits_SV: Tensor, options: SampleOptions, uniform_S: Tensor) -> Tensor:
    """Draw one token per sample: (S,) int64 on the CPU.

    Inverse transform sampling: tokens are sorted by descending probability (ties by id), and the first token
    whose cumulative probability exceeds the uniform number is drawn.
    """
    logits = logits_SV.cpu().double()
    if not logits.isfinite().all():
        raise CheckpointError(
            expected="a model with finite logits",
            found="NaN or infinity; the run probably diverged",
            do="sample from an earlier checkpoint",
        )
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    scaled, tokens_SV = logits.sort(dim=-1, descending=True, stable=True)
    # Subtract the maximum first, so that a temperature near 0 does not overflow.
    probabilities = ((scaled - scaled[:, :1]) / options.temperature).softmax(dim=-1)
    if options.top_k is not None:
        probabilities = probabilities[:, : options.top_k]
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    cumulative = probabilities.cumsum(dim=-1)
    if options.top_p is not None:
        # Keep a token if the tokens before it sum to less than top_p. The most likely token is always kept.
        probabilities = probabilities.where(cumulative - probabilities < options.top_p, 0.0)
        cumulative = probabilities.cumsum(dim=-1)
    picked = torch.searchsorted(cumulative, uniform_S[:, None] * cumulative[:, -1:], right=True)
    last_kept = (probabilities > 0).sum(dim=-1, keepdim=True) - 1  # guards against rounding up to the total
    return tokens_SV.gather(1, torch.minimum(picked, last_kept))[:, 0]
