"""The model `hotlap` of the harness: `lm_eval --model hotlap --model_args path=runs/first --tasks …`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from hotlap.errors import ConfigError
from hotlap.harness.scoring import Request, score
from hotlap.inference.generate import TextStream
from hotlap.inference.load import LoadedModel, load
from hotlap.inference.options import SampleOptions

# Texts in one forward pass, unless the harness is told another number.
TEXTS_AT_ONCE = 16
# The harness's own limit, where a task has none.
MAX_NEW_TOKENS = 256

Scored = tuple[float, bool]


class HotlapLM(TemplateLM):
    def __init__(
        self,
        path: str | None = None,
        checkpoint: str = "auto",
        device: str | None = None,
        precision: str | None = None,
        trust_code: bool = False,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        loaded: LoadedModel | None = None,
    ) -> None:
        """`path` and what follows are as for `hotlap.load`; or `loaded`, a model that is already there."""
        super().__init__()
        if loaded is None:
            if path is None:
                raise ConfigError(expected="--model_args path=RUN", found="no path", do="add it")
            chosen = usable_device(device)
            loaded = load(
                path, checkpoint=checkpoint, device=chosen, precision=precision, trust_code=trust_code
            )
        self.loaded = loaded
        self.batch_size = texts_at_once(batch_size, max_batch_size)
        self._device = loaded.device

    @property
    def eot_token_id(self) -> int:
        return self.loaded.tokenizer.end_of_text

    @property
    def tokenizer_name(self) -> str:
        """Names the harness's caches of requests."""
        return f"{self.loaded.tokenizer.name}-{self.loaded.tokenizer.fingerprint[:16]}"

    def get_model_info(self) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in self.loaded.model.parameters())
        return {"model_num_parameters": parameters, "model_dtype": str(self.loaded.model.dtype)}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text is the start of a document, and so starts with end of text."""
        ids: list[int] = self.loaded.tokenizer.encode(string).tolist()
        return ids if add_special_tokens is False else [self.eot_token_id, *ids]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[Scored]:
        texts = [Request([*context, *continuation], len(context)) for _, context, continuation in requests]
        found: list[Scored] = []
        scores = score(self.loaded, texts, self.batch_size)
        for (key, *_rest), one in zip(
            requests,
            tqdm(scores, total=len(texts), desc="log-likelihoods", disable=disable_tqdm),
            strict=True,
        ):
            found.append((one.log_likelihood, one.is_greedy))
            self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [Request(self.tok_encode(request.args[0]), 1) for request in requests]
        scores = score(self.loaded, texts, self.batch_size)
        found: list[float] = []
        for request, one in zip(
            requests, tqdm(scores, total=len(texts), desc="texts", disable=disable_tqdm), strict=True
        ):
            found.append(one.log_likelihood)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: list[str] = []
        for number, request in enumerate(tqdm(requests, desc="continuations", disable=disable_tqdm)):
            context, wanted = request.args
            found.append(self.go_on(context, dict(wanted), seed=number))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def go_on(self, context: str, wanted: dict[str, Any], seed: int) -> str:
        """The continuation up to the first stop string, without it. Of a limited context its end is read."""
        until = wanted.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        options = sample_options(wanted, seed)
        stream = TextStream(self.loaded.tokenizer)
        text = ""
        for (token,) in self.loaded.generate_steps(context, options):
            assert token is not None, "generation ends with its only sample"
            text += stream.add(token)
            ends = [text.index(stop) for stop in stops if stop in text]
            if ends:
                return text[: min(ends)]
        return text + stream.close()


def sample_options(wanted: dict[str, Any], seed: int) -> SampleOptions:
    """From a task's `generation_kwargs`. Greedy unless it asks for samples."""
    limits = [wanted.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    temperature = float(wanted.pop("temperature", None) or 0.0)
    samples = wanted.pop("do_sample", temperature > 0)
    top_k, top_p = wanted.pop("top_k", None), wanted.pop("top_p", None)
    unknown = {name: value for name, value in wanted.items() if value is not None}
    if unknown:
        raise ConfigError(
            expected="generation_kwargs until, max_gen_toks, do_sample, temperature, top_k, top_p",
            found=", ".join(unknown),
            do="leave it out of the task or of --gen_kwargs",
        )
    return SampleOptions(
        max_tokens=next((int(limit) for limit in limits if limit is not None), MAX_NEW_TOKENS),
        temperature=(temperature or 1.0) if samples else 0.0,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )


def texts_at_once(batch_size: int | str | None, max_batch_size: int | None) -> int:
    """The harness gives 1 if it was not told, and may be told `auto` or `auto:N`."""
    if batch_size is None or str(batch_size).partition(":")[0] == "auto":
        return max_batch_size or TEXTS_AT_ONCE
    number = int(batch_size) if str(batch_size).isdigit() else 0
    if number < 1:
        raise ConfigError(
            expected="a batch size of at least 1, or auto", found=str(batch_size), do="change it"
        )
    return number


def usable_device(device: str | None) -> str:
    """The harness asks for cuda:0 if it was not told; where there is none, what a run would use."""
    import torch

    if device is None:
        return "auto"
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        logging.getLogger(__name__).warning("no CUDA here: %s becomes auto", device)
        return "auto"
    return kind
