"""Text generation: the sampling loop, streaming detokenization, and samples during training.

A prompt is treated as the start of a document, so the end-of-text token is prepended. A sample ends when that
token is drawn. Only ids in the tokenizer's vocabulary are drawn, never padding.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotlap.attention.visibility import Visibility
from hotlap.config import Config
from hotlap.corpus.tokenizer import Tokenizer
from hotlap.inference.choose import Draws, choose
from hotlap.inference.decode import Decoder
from hotlap.inference.options import SampleOptions
from hotlap.model import GPT, GPT2


@dataclass(frozen=True)
class Sample:
    tokens: list[int]  # without the prompt and the end-of-text token
    ended: bool  # True: by end of text; False: by max_tokens


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    return [tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()]


def generate(
    model: GPT | GPT2,
    visibility: Visibility,
    prompt: Sequence[int],
    options: SampleOptions,
    *,
    known_tokens: int,
) -> Iterator[list[int | None]]:
    """Yield the next token of each sample, step by step; None for samples that have ended.

    Only ids below `known_tokens` are drawn. Sample i gets the same random numbers for any number of samples.
    """
    draws = Draws(options.seed, options.num_samples)
    device = model.device
    decoder = Decoder(model, visibility, options.num_samples)
    logits_SV = decoder.start(torch.tensor(prompt, dtype=torch.long, device=device))
    ended = [False] * options.num_samples
    for count in range(1, options.max_tokens + 1):
        tokens_S = choose(logits_SV[:, :known_tokens], options, draws.next())
        drawn = tokens_S.tolist()
        ended = [was or token == visibility.end_of_text for was, token in zip(ended, drawn, strict=True)]
        if all(ended):
            return
        yield [None if over else token for over, token in zip(ended, drawn, strict=True)]
        if count < options.max_tokens:
            logits_SV = decoder.step(tokens_S.to(device))


def samples(steps: Iterator[list[int | None]], options: SampleOptions) -> list[Sample]:
    """Collect the steps of `generate` into whole samples."""
    tokens: list[list[int]] = [[] for _ in range(options.num_samples)]
    for step in steps:
        for sample, token in zip(tokens, step, strict=True):
            if token is not None:
                sample.append(token)
    return [Sample(sample, ended=len(sample) < options.max_tokens) for sample in tokens]


class TextStream:
    """Streaming detokenizer. A character split over several tokens is returned with its last byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def close(self) -> str:
        """The bytes of an incomplete last character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def sample_text(
    model: GPT | GPT2,
    config: Config,
    tokenizer: Tokenizer,
    step: int,
    *,
    prompt: str = "",
    **options: Any,
) -> str:
    """The prompt and its continuation by a model after `step` updates. Deterministic.

    `options` are the fields of `SampleOptions`. Safe to call during training: it does not recompile the model
    or change the random state.
    """
    sample_options = SampleOptions(**options)
    visibility = Visibility.at_step(config, step, tokenizer.end_of_text)
    ids = encode_prompt(tokenizer, prompt)
    with torch.compiler.set_stance("force_eager"):
        steps = generate(model, visibility, ids, sample_options, known_tokens=tokenizer.vocab_size)
        first = samples(steps, sample_options)[0]
    return prompt + tokenizer.decode(first.tokens)
