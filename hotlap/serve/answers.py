"""The API's JSON: completions, whole and in chunks, their log-probabilities and the list of models.

https://platform.openai.com/docs/api-reference/completions/object
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from hotlap.corpus.tokenizer import Tokenizer
from hotlap.serve.choice import Choice, Piece, WrittenToken


class Answer:
    """The JSON of one request."""

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self.model = model
        self._tokenizer = tokenizer
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def completion(self, choices: Sequence[Choice]) -> dict[str, Any]:
        described = []
        for choice in choices:
            described.append(self.choice(choice, choice.take(), is_first=True))
        return {**self._envelope(described), "usage": usage(choices)}

    def chunk(self, described: Sequence[dict[str, Any]], *, with_usage: bool) -> dict[str, Any]:
        """With usage asked for, every chunk has the field; the last one, without choices, has the figures."""
        return {**self._envelope(described), **({"usage": None} if with_usage else {})}

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._envelope([]), "usage": usage(choices)}

    def choice(self, choice: Choice, piece: Piece, *, is_first: bool) -> dict[str, Any]:
        """What is new of a text; the first time after the prompt, if that is echoed."""
        echoed = self._tokenizer.decode(choice.prompt[1:]) if choice.echo and is_first else ""
        logprobs = None
        if choice.likeliest is not None:
            tokens = choice.prompt_tokens if echoed else []
            shift = len(self._tokenizer.decode(choice.prompt[1:])) if choice.echo else 0
            logprobs = self._logprobs(tokens, piece.tokens, shift)
        return {
            "index": choice.index,
            "text": echoed + piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.ending,
        }

    def _logprobs(
        self, prompt: Sequence[WrittenToken], tokens: Sequence[WrittenToken], shift: int
    ) -> dict[str, Any]:
        """`shift`: characters of the echoed prompt, which come before those of the text."""
        every = [*prompt, *tokens]
        return {
            "tokens": [self.token_text(token.id) for token in every],
            "token_logprobs": [token.logprob for token in every],
            "top_logprobs": [
                {self.token_text(one): logprob for one, logprob in token.likeliest} for token in every
            ],
            "text_offset": [*(token.offset for token in prompt), *(token.offset + shift for token in tokens)],
        }

    def token_text(self, token: int) -> str:
        r"""The text of one token. A part of a character is written as its bytes, `bytes:\xe6\x97`."""
        if token == self._tokenizer.end_of_text:
            return "<|endoftext|>"
        content = self._tokenizer.decode_bytes([token])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _envelope(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self.model,
            "choices": list(choices),
        }


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Each prompt counts once, without the end-of-text token in front of it."""
    prompts = {id(choice.prompt): len(choice.prompt) - 1 for choice in choices}
    read, written = sum(prompts.values()), sum(choice.num_tokens for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def model_card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "hotlap"}
