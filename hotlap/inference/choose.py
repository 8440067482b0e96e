"""Which token comes next: temperature, top-k and top-p over the logits, then one draw a sample.

A draw is a function of the logits and of one uniform number, taken on the CPU in float64, so that the same
seed gives the same text on every device and for any number of samples side by side.

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotlap.errors import CheckpointError
from hotlap.inference.options import SampleOptions


class Draws:
    """Uniform numbers in [0, 1), one a sample and step. Each sample has a sequence of its own."""

    def __init__(self, seed: int, num_samples: int) -> None:
        self._generators = [np.random.default_rng([seed, sample]) for sample in range(num_samples)]

    def next(self) -> Tensor:
        """(S,) float64"""
        return torch.tensor([generator.random() for generator in self._generators], dtype=torch.float64)


def choose(logits_SV: Tensor, options: SampleOptions, uniform_S: Tensor) -> Tensor:
    """(S,) int64 on the CPU: for each sample, the token at which the kept probability first exceeds its draw.

    Tokens are laid out from the likeliest down, equals in order of their ids.
    """
    logits = logits_SV.cpu().double()
    if not logits.isfinite().all():
        raise CheckpointError(
            expected="a model with finite logits",
            found="NaN or infinity, as after a run that diverged",
            do="sample from an earlier checkpoint",
        )
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    scaled, tokens_SV = logits.sort(dim=-1, descending=True, stable=True)
    # Relative to the largest, so that a temperature near 0 does not overflow.
    probabilities = ((scaled - scaled[:, :1]) / options.temperature).softmax(dim=-1)
    if options.top_k is not None:
        probabilities = probabilities[:, : options.top_k]
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    reached = probabilities.cumsum(dim=-1)
    if options.top_p is not None:
        # Kept while those before are not yet enough, so that the likeliest always is.
        probabilities = probabilities.where(reached - probabilities < options.top_p, 0.0)
        reached = probabilities.cumsum(dim=-1)
    picked = torch.searchsorted(reached, uniform_S[:, None] * reached[:, -1:], right=True)
    last_kept = (probabilities > 0).sum(dim=-1, keepdim=True) - 1  # should rounding lift a draw to the total
    return tokens_SV.gather(1, torch.minimum(picked, last_kept))[:, 0]
