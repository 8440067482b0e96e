"""Tokens and text from a model: the loop that draws them, the stream that shows them, the text of a sample.

A prompt is read as the start of a document, with the end-of-text token in front; drawing that token again
ends a sample. Only tokens that the tokenizer knows are ever drawn.
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
    tokens: list[int]  # after the prompt, without the end of text
    ended: bool  # by the end of text, rather than by the number of tokens asked for


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
    """Step by step, the next token of every sample; None for those that have ended.

    `known_tokens`: only ids below are drawn. The same seed gives sample i the same draws in any company.
    """
    draws = Draws(options.seed, options.num_samples)
    device = model.embed.weight.device
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
    """The whole samples that `generate` goes through."""
    tokens: list[list[int]] = [[] for _ in range(options.num_samples)]
    for step in steps:
        for sample, token in zip(tokens, step, strict=True):
            if token is not None:
                sample.append(token)
    return [Sample(sample, ended=len(sample) < options.max_tokens) for sample in tokens]


class TextStream:
    """Text as its tokens come: a character whose bytes are split over tokens appears when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def close(self) -> str:
        """What is left of a character that never became whole, as U+FFFD."""
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
    """The prompt and what a model goes on with after `step` updates of its run; the same each time.

    `options` are those of `SampleOptions`. Made for a run in progress: what was compiled for training stays
    as it is, and so do its random numbers.
    """
    asked = SampleOptions(**options)
    visibility = Visibility.at_step(config, step, tokenizer.end_of_text)
    ids = encode_prompt(tokenizer, prompt)
    with torch.compiler.set_stance("force_eager"):
        steps = generate(model, visibility, ids, asked, known_tokens=tokenizer.vocab_size)
        first = samples(steps, asked)[0]
    return prompt + tokenizer.decode(first.tokens)
