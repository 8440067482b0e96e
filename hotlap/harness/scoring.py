"""Log-likelihoods of tokens, given all before them: those of `LoadedModel.logits`, for many texts at once.

Several texts are packed into one sequence, as in training: the mask keeps documents apart. Each starts at the
start of a block, so that a window in blocks covers the same of it as when it is alone.

Shapes: T tokens of a packed sequence, N scored tokens, C width, V the tokenizer's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotlap.inference.decode import prompt_plan
from hotlap.inference.load import LoadedModel
from hotlap.model import GPT2

ROWS_AT_ONCE = 2048  # of logits, to bound memory


@dataclass(frozen=True)
class Request:
    """Score `ids[first:]`, each given all before it. `first` is at least 1."""

    ids: Sequence[int]
    first: int


@dataclass(frozen=True)
class Score:
    log_likelihood: float  # the sum over the scored tokens, in nats
    is_greedy: bool  # whether each was the likeliest


def score(loaded: LoadedModel, requests: Sequence[Request], at_once: int = 1) -> Iterator[Score]:
    """One score per request, in order. `at_once`: how many may share a forward pass."""
    packable = [request for request in requests if can_be_packed(loaded, request)]
    at_once = at_once if len(packable) == len(requests) else 1
    for start in range(0, len(requests), at_once):
        together = requests[start : start + at_once]
        if isinstance(loaded.model, GPT2):
            (request,) = together
            parts = [score_packed(loaded, [part])[0] for part in windows(request, loaded.model.max_tokens)]
            total = math.fsum(part.log_likelihood for part in parts)
            yield Score(total, all(part.is_greedy for part in parts))
        else:
            yield from score_packed(loaded, together)


def can_be_packed(loaded: LoadedModel, request: Request) -> bool:
    """Only a text that starts with the token that starts a document is kept apart from the one before it."""
    return request.ids[0] == loaded.visibility.starts_document


def windows(request: Request, max_tokens: int) -> Iterator[Request]:
    """The parts that fit into a context of `max_tokens`, which together score the same tokens.

    All of the text if it fits. Otherwise the first part is followed by parts with a whole context each, as in
    the harness's own rolling windows, so that each token has as much before it as fits.
    """
    ids, first = request.ids, request.first
    while first < len(ids):
        # Of a long text whose scored part fits: its end. Of a long scored part: as much as fits at once.
        end = min(len(ids), first + max_tokens)
        start = max(0, end - 1 - max_tokens)
        yield Request(ids[start:end], first - start)
        first = end


@torch.no_grad()
def score_packed(loaded: LoadedModel, requests: Sequence[Request]) -> list[Score]:
    """In one forward pass over all of them."""
    model, visibility = loaded.model, loaded.visibility
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []  # of the hidden states that predict a scored token
    targets: list[int] = []
    for request in requests:
        gap = -len(tokens) % visibility.block_size
        tokens += [visibility.end_of_text] * gap
        positions += [0] * gap
        read = request.ids[:-1] or request.ids  # the last is only scored
        rows += range(len(tokens) + request.first - 1, len(tokens) + len(request.ids) - 1)
        targets += request.ids[request.first :]
        tokens += read
        positions += range(len(read))
    tokens_T = torch.tensor(tokens, device=loaded.device)
    plans = [prompt_plan(visibility, tokens_T)] * loaded.config.model.num_layers
    x_TC = model.hidden(tokens_T, plans, torch.tensor(positions, device=loaded.device))
    log_likelihoods, greedy = score_rows(loaded, x_TC[rows], torch.tensor(targets, device=loaded.device))
    scores, start = [], 0
    for request in requests:
        end = start + len(request.ids) - request.first
        scores.append(Score(math.fsum(log_likelihoods[start:end]), all(greedy[start:end])))
        start = end
    return scores


def score_rows(loaded: LoadedModel, x_NC: Tensor, targets_N: Tensor) -> tuple[list[float], list[bool]]:
    """Per scored token its log-likelihood, and whether it was the likeliest."""
    log_likelihoods: list[float] = []
    greedy: list[bool] = []
    parts = zip(x_NC.split(ROWS_AT_ONCE), targets_N.split(ROWS_AT_ONCE), strict=True)
    for x_rows, targets in parts:
        logits_NV = loaded.model.logits(x_rows)[:, : loaded.tokenizer.vocab_size]
        log_likelihoods += logits_NV.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        greedy += (logits_NV.argmax(-1) == targets).tolist()
    return log_likelihoods, greedy
