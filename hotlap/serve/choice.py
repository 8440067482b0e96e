"""One text while it is written: its random draws, where it stops, and what may be shown of it already.

A stop sequence is never shown, nor is the start of one while it may still become one. Everything here runs on
the engine's thread, except `take`, which hands what is ready to the request's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hotlap.corpus.tokenizer import Tokenizer
from hotlap.inference.generate import TextStream
from hotlap.inference.options import SampleOptions

Ending = Literal["stop", "length"]


@dataclass(frozen=True)
class WrittenToken:
    id: int
    offset: int  # in characters: where its text begins, in the text without the prompt
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()  # (id, logprob), most likely first


@dataclass
class Piece:
    """What is new since the last piece."""

    text: str = ""
    tokens: list[WrittenToken] = field(default_factory=list)
    ending: Ending | None = None


class Choice:
    """The engine adds tokens, the request takes pieces."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        options: SampleOptions,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        draw: int = 0,
        stop: Sequence[str] = (),
        likeliest: int | None = None,
        echo: bool = False,
    ) -> None:
        """`max_tokens` may be 0, which only echoes the prompt.

        `draw`: which sample of the seed, counted as `hotlap sample` does.
        `likeliest`: how many alternatives to give with the log-probability of each token; None: neither.
        """
        self.index = index
        self.prompt = prompt  # with the end-of-text token that starts a document
        self.options = options
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.likeliest = likeliest
        self.echo = echo
        self.prompt_tokens: list[WrittenToken] = []  # their log-probabilities, if they are echoed with them
        self.num_tokens = 0
        self.ending: Ending | None = None
        self.cancelled = False  # by the request's thread; the engine then forgets it
        self._draws = np.random.default_rng([options.seed, draw])
        self._stream = TextStream(tokenizer)
        self._text = ""
        self._shown = 0  # characters of the text that were released
        self._held: list[WrittenToken] = []  # not released yet
        self._ready = Piece()
        self._lock = threading.Lock()

    def next_uniform(self) -> float:
        return float(self._draws.random())

    def add(self, token: WrittenToken) -> None:
        """One more token, which is not the end of the text."""
        before = len(self._text)
        self._text += self._stream.add(token.id)
        self._held.append(token)
        self.num_tokens += 1
        cut = self._first_stop(before)
        if cut is not None:
            self._text = self._text[:cut]
            self._held = [one for one in self._held if one.offset < cut]
            self._end("stop")
        elif self.num_tokens == self.max_tokens:
            self.close("length")
        else:
            self._release(len(self._text) - self._unsure())

    def close(self, ending: Ending) -> None:
        """The text ends with the last token: an incomplete character becomes U+FFFD."""
        self._text += self._stream.close()
        self._end(ending)

    @property
    def offset(self) -> int:
        """Where the text of the next token begins."""
        return len(self._text)

    def take(self) -> Piece:
        with self._lock:
            ready, self._ready = self._ready, Piece()
        return ready

    def _end(self, ending: Ending) -> None:
        self.ending = ending
        self._release(len(self._text))

    def _release(self, until: int) -> None:
        """Show the text up to a character, with the tokens that begin before it."""
        done = self.ending is not None
        count = len(self._held) if done else sum(token.offset < until for token in self._held)
        with self._lock:
            self._ready.text += self._text[self._shown : until]
            self._ready.tokens += self._held[:count]
            self._ready.ending = self.ending
        self._shown, self._held = max(self._shown, until), self._held[count:]

    def _first_stop(self, before: int) -> int | None:
        """Where the first stop sequence begins that ends after the character `before`."""
        found = []
        for stop in self.stop:
            at = self._text.find(stop, max(self._shown, before - len(stop) + 1))
            if at >= 0:
                found.append(at)
        return min(found, default=None)

    def _unsure(self) -> int:
        """How many characters at the end may be the start of a stop sequence."""
        rest = len(self._text) - self._shown
        for length in range(min(max(map(len, self.stop), default=1) - 1, rest), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self.stop):
                return length
        return 0
