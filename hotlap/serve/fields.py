"""What a completion request asks for: the fields of its JSON, each checked, with a message that names it.

The fields are those of https://platform.openai.com/docs/api-reference/completions, and `top_k`. A field that
the server does not carry out is refused unless its value changes nothing.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotlap.errors import ConfigError
from hotlap.inference.options import SampleOptions
from hotlap.serve.api_error import ApiError

MOST_LIKELIEST = 20  # of `logprobs`
MOST_STOPS = 16
LONGEST_STOP = 1024  # characters
LARGEST_SEED = 2**63 - 1

# Fields that would change the text in a way that is not built, and the values that change nothing.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
}
FIELDS = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "best_of", "seed", "stop"),
    *("logprobs", "echo", "stream", "stream_options", "user", *NOT_BUILT),
}


@dataclass(frozen=True)
class CompletionRequest:
    model: str
    prompts: tuple[str | tuple[int, ...], ...]  # text, or token ids
    options: SampleOptions  # `num_samples` per prompt
    max_tokens: int  # may be 0
    stop: tuple[str, ...]
    likeliest: int | None  # alternatives per token, with log-probabilities; None: neither
    echo: bool
    stream: bool
    stream_usage: bool


def parse_json(body: bytes) -> dict[str, Any]:
    try:
        # Python's parser also reads NaN and Infinity, which are not JSON.
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"We could not parse the JSON body of your request: {error}") from None
    if not isinstance(content, dict):
        raise ApiError(f"The body must be a JSON object, not {kind_of(content)}.")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_request(content: Mapping[str, Any]) -> CompletionRequest:
    for name, value in content.items():
        if name not in FIELDS:
            raise ApiError(f"Unrecognized request argument supplied: {name}", param=name)
        if name in NOT_BUILT and value not in NOT_BUILT[name]:
            raise ApiError(f"`{name}` is not supported by this server; leave it out.", param=name)
    read = _Reader(content)
    n = read.integer("n", 1, least=1)
    if read.integer("best_of", n, least=1) != n:
        raise ApiError("`best_of` other than `n` is not supported by this server.", param="best_of")
    echo = read.boolean("echo")
    max_tokens = read.integer("max_tokens", 16, least=0 if echo else 1)
    seed = read.integer("seed", secrets.randbelow(2**31), least=0, most=LARGEST_SEED)
    return CompletionRequest(
        model=read.model(),
        prompts=read.prompts(),
        options=read.sample_options(n, seed),
        max_tokens=max_tokens,
        stop=read.stop(),
        likeliest=read.likeliest(),
        echo=echo,
        stream=read.boolean("stream"),
        stream_usage=read.stream_usage(),
    )


class _Reader:
    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def integer(self, name: str, default: int, *, least: int, most: int | None = None) -> int:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(name, "an integer", value)
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None or value < least else f"at most {most}"
            raise ApiError(f"`{name}` must be {bounds}, not {shortened(value)}.", param=name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_type(name, "a number", value)
        if not math.isfinite(value) or abs(value) > 1e6:
            raise ApiError(f"`{name}` must be a number of usual size, not {shortened(value)}.", param=name)
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self._content.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(name, "a boolean", value)
        return bool(value)

    def model(self) -> str:
        value = self._content.get("model")
        if value is None:
            raise ApiError("you must provide a model parameter", param="model")
        if not isinstance(value, str):
            raise wrong_type("model", "a string", value)
        return value

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        value = self._content.get("prompt")
        if value is None:
            return ("",)
        many = isinstance(value, list) and value and not is_id(value[0])
        prompts = value if many else [value]
        for prompt in prompts:
            if not isinstance(prompt, str) and not (
                isinstance(prompt, list) and prompt and all(map(is_id, prompt))
            ):
                raise wrong_type("prompt", "a string, token ids, or an array of either", prompt)
        return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)

    def sample_options(self, n: int, seed: int) -> SampleOptions:
        top_k = self.integer("top_k", 0, least=0)
        top_p = self.number("top_p", 1.0)
        try:
            return SampleOptions(
                num_samples=n,
                temperature=self.number("temperature", 1.0),
                top_k=top_k or None,
                top_p=None if top_p == 1.0 else top_p,
                seed=seed,
            )
        except ConfigError as mistake:
            name = next((one for one in ("temperature", "top-p") if one in mistake.expected), None)
            raise ApiError(
                f"expected {mistake.expected}; found {mistake.found}",
                param=name and name.replace("-", "_"),
            ) from None

    def stop(self) -> tuple[str, ...]:
        value = self._content.get("stop")
        stops = [value] if isinstance(value, str) else (value or [])
        if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
            raise wrong_type("stop", "a string or an array of strings, none of them empty", value)
        if len(stops) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in stops):
            limits = f"at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters"
            raise ApiError(f"`stop` may have {limits}.", param="stop")
        return tuple(stops)

    def likeliest(self) -> int | None:
        if self._content.get("logprobs") is None:
            return None
        return self.integer("logprobs", 0, least=0, most=MOST_LIKELIEST)

    def stream_usage(self) -> bool:
        options = self._content.get("stream_options")
        if options is None:
            return False
        if not isinstance(options, dict):
            raise wrong_type("stream_options", "an object", options)
        return _Reader(options).boolean("include_usage")


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names.get(type(value), "an object")


def wrong_type(name: str, expected: str, found: Any) -> ApiError:
    return ApiError(f"Invalid type for `{name}`: expected {expected}, but got {kind_of(found)}.", param=name)


def shortened(value: float) -> str:
    """Numbers of JSON may have thousands of digits."""
    try:
        text = str(value)
    except ValueError:  # Python does not print integers beyond a length
        return "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}…"
