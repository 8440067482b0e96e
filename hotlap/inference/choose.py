"""Sample the next token: apply temperature, top-k and top-p to the logits, then draw one token per sample.

A draw depends only on the logits and one uniform number. It is computed on the CPU in float64, so that the
same seed gives the same text on every device and with any number of samples.

Shapes: S samples, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class RowOptions:
    """How to draw for each row: a column (S, 1) float64 each, None where no row limits its choice."""

    greedy: Tensor  # (S, 1) bool
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None

    @classmethod
    def of(cls, options: Sequence[SampleOptions]) -> RowOptions:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)[:, None]

        temperatures = [one.temperature for one in options]
        top_k = [math.inf if one.top_k is None else one.top_k for one in options]
        top_p = [math.inf if one.top_p is None else one.top_p for one in options]
        return cls(
            greedy=torch.tensor([[temperature == 0] for temperature in temperatures]),
            temperature=column([temperature or 1.0 for temperature in temperatures]),
            top_k=column(top_k) if min(top_k) < math.inf else None,
            top_p=column(top_p) if min(top_p) < math.inf else None,
        )


def choose(logits_SV: Tensor, options: SampleOptions, uniform_S: Tensor) -> Tensor:
    """Draw one token per sample: (S,) int64 on the CPU."""
    return choose_each(logits_SV, RowOptions.of([options] * len(logits_SV)), uniform_S)


def choose_each(logits_SV: Tensor, options: RowOptions, uniform_S: Tensor) -> Tensor:
    """Draw one token per row, each with its own options: (S,) int64 on the CPU.

    Inverse transform sampling: tokens are sorted by descending probability (ties by id), and the first token
    whose cumulative probability exceeds the uniform number is drawn.
    """
    logits_SV = logits_SV.cpu()
    if not torch.stack(logits_SV.aminmax()).isfinite().all():
        raise CheckpointError(
            expected="a model with finite logits",
            found="NaN or infinity; the run probably diverged",
            do="sample from an earlier checkpoint",
        )
    if options.greedy.all():
        return logits_SV.argmax(dim=-1)
    tokens_SV = descending(logits_SV)
    scaled = logits_SV.double().gather(1, tokens_SV)
    # Subtract the maximum first, so that a temperature near 0 does not overflow.
    probabilities = ((scaled - scaled[:, :1]) / options.temperature).softmax(dim=-1)
    if options.top_k is not None:
        ranks_V = torch.arange(probabilities.size(-1))
        probabilities = probabilities.where(ranks_V < options.top_k, 0.0)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    cumulative = probabilities.cumsum(dim=-1)
    if options.top_p is not None:
        # Keep a token if the tokens before it sum to less than top_p. The most likely token is always kept.
        probabilities = probabilities.where(cumulative - probabilities < options.top_p, 0.0)
        cumulative = probabilities.cumsum(dim=-1)
    picked = torch.searchsorted(cumulative, uniform_S[:, None] * cumulative[:, -1:], right=True)
    last_kept = (probabilities > 0).sum(dim=-1, keepdim=True) - 1  # guards against rounding up to the total
    picked = torch.minimum(picked, last_kept).masked_fill(options.greedy, 0)
    return tokens_SV.gather(1, picked)[:, 0]


def descending(logits_SV: Tensor) -> Tensor:
    """(S, V): each row's tokens by descending logit, ties by id.

    A stable sort takes longer than a small model's step. NumPy sorts 64-bit integers with vector
    instructions, so a float32 logit and its id become one integer: the logit's bits, of which the sign is
    folded so that integers order like floats, above the id's.
    """
    if logits_SV.dtype != torch.float32:
        return logits_SV.argsort(dim=-1, descending=True, stable=True)
    bits = (0.0 - logits_SV.numpy()).view(np.int32)  # 0 − x: no −0.0, which would come before 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.astype(np.int64) << 32) | np.arange(logits_SV.size(-1))
    keys.sort(axis=-1)
    return torch.from_numpy(keys & 0xFFFFFFFF)
