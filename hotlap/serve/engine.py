"""Continuous batching: the texts that a model is writing are rows of one batch, and enter and leave it alone.

A thread per model repeats: take waiting texts into free rows, draw a token for each row, decode one step. A
row's draws depend on its seed and logits, its logits on its own text (`inference/decode.py`). So each text is
what `hotlap sample` writes with that seed, whatever else is in the batch.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotlap.attention.mask import NO_TOKEN
from hotlap.errors import HotlapError
from hotlap.inference.choose import RowOptions, choose_each
from hotlap.inference.decode import Decoder
from hotlap.inference.load import LoadedModel
from hotlap.serve.choice import Choice, WrittenToken

# Rows of prompt logits held at once while the log-probabilities of a prompt are computed.
PROMPT_CHUNK = 256
# How repeatability is tried: with so many texts, over so many tokens.
MANY_TEXTS = 9
TRIED_TOKENS = 4


class QueueFullError(Exception):
    """More texts wait than the queue holds."""


class Job:
    """The texts of one request. `wake` is called, on the engine's thread, when there is something to take."""

    def __init__(self, choices: Sequence[Choice], wake: Callable[[], None], *, stream: bool = False) -> None:
        self.choices = choices
        self.wake = wake
        self.stream = stream  # wake for every step, not only at the end
        self.failure: Exception | None = None

    @property
    def done(self) -> bool:
        return self.failure is not None or all(choice.ending is not None for choice in self.choices)

    def cancel(self) -> None:
        """From any thread; the rows are free after the step that is being computed."""
        for choice in self.choices:
            choice.cancelled = True


@dataclass
class Row:
    job: Job
    choice: Choice


class Engine:
    def __init__(self, loaded: LoadedModel, num_rows: int, queue_limit: int) -> None:
        self.loaded = loaded
        self.num_rows = num_rows
        self.queue_limit = queue_limit
        self.tokenizer = loaded.tokenizer
        self.decoder = Decoder(loaded.model, loaded.visibility, num_rows)
        self.steps = 0  # for tests and measurements
        self._rows: list[Row | None] = [None] * num_rows
        self._queue: deque[Row] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._options: RowOptions | None = None  # of the rows in use; None after a change
        self._logits = torch.zeros(num_rows, self.tokenizer.vocab_size)
        self._thread = threading.Thread(target=self._run, name="hotlap-serve-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def repeatability(self) -> str:
        """Whether a text is the same alone and among others, tried by the bits of logits before `start`."""
        alone, texts = Decoder(self.loaded.model, self.loaded.visibility), min(self.num_rows, MANY_TEXTS)
        prompt_T = torch.tensor([self.tokenizer.end_of_text], device=alone.device)
        same = True
        for decoder, number in ((alone, 1), (self.decoder, texts)):
            decoder.start(prompt_T, range(number))
        for token in range(TRIED_TOKENS):
            others = [(token + number) % self.tokenizer.vocab_size for number in range(texts)]
            among_SV = self.decoder.step(torch.tensor(others, device=alone.device))
            same &= torch.equal(alone.step(torch.tensor(others[:1], device=alone.device)), among_SV[:1])
        for number in range(texts):
            self.decoder.release(number)
        return "same seed, same text" if same else "same seed, same text up to rounding (docs/serving.md)"

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def writing(self) -> int:
        return sum(row is not None for row in self._rows)

    def submit(self, job: Job) -> None:
        """Raises `QueueFullError`, and then nothing of the job is kept."""
        with self._changed:
            self._forget_cancelled()
            free = self._rows.count(None) + self.queue_limit - len(self._queue)
            if len(job.choices) > free:
                raise QueueFullError
            self._queue.extend(Row(job, choice) for choice in job.choices)
            self._changed.notify()

    def stop(self) -> None:
        """End all texts with an error, after the step that is being computed. Safe in a signal handler."""
        self._closing = True

    def close(self) -> None:
        self.stop()
        with self._changed:
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._forget_cancelled()
                while not (self._closing or self._queue or self._in_use()):
                    self._changed.wait()
                if self._closing:
                    self._fail_all(ConnectionAbortedError("the server is stopping"))
                    return
                entering = self._take_from_queue()
            try:
                for group in entering:
                    self._enter(group)
                if self._in_use():
                    self._step()
            except Exception as error:  # a diverged model, too little memory, a bug: the server goes on
                if not isinstance(error, HotlapError):
                    traceback.print_exc()
                with self._changed:
                    self._fail_all(error)

    def _in_use(self) -> list[int]:
        return [number for number, row in enumerate(self._rows) if row is not None]

    def _forget_cancelled(self) -> None:
        if any(row.choice.cancelled for row in self._queue):
            self._queue = deque(row for row in self._queue if not row.choice.cancelled)
        for number, row in enumerate(self._rows):
            if row is not None and row.choice.cancelled and threading.current_thread() is self._thread:
                self._leave(number)

    def _take_from_queue(self) -> list[list[tuple[int, Row]]]:
        """Give free rows to waiting texts, in groups that share a prompt."""
        free = [number for number, row in enumerate(self._rows) if row is None]
        groups: list[list[tuple[int, Row]]] = []
        for number in free:
            if not self._queue:
                break
            row = self._queue.popleft()
            self._rows[number] = row
            if groups and groups[-1][0][1].choice.prompt is row.choice.prompt:
                groups[-1].append((number, row))
            else:
                groups.append([(number, row)])
        return groups

    def _leave(self, number: int) -> None:
        self._rows[number] = None
        self.decoder.release(number)
        self._options = None

    def _fail_all(self, error: Exception) -> None:
        failed = {id(row.job): row.job for row in (*self._queue, *filter(None, self._rows))}
        self._queue.clear()
        for number in self._in_use():
            self._leave(number)
        for job in failed.values():
            job.failure = error
            job.wake()

    def _enter(self, group: Sequence[tuple[int, Row]]) -> None:
        """Prefill one prompt into the rows of all that share it."""
        self._options = None
        numbers = [number for number, _ in group]
        prompt_T = torch.tensor(group[0][1].choice.prompt, device=self.decoder.device)
        x_TC = self.decoder.prefill(prompt_T, numbers)
        with torch.no_grad():
            self._logits[numbers] = self._known(self.decoder.model.logits(x_TC[-1:])).expand(len(group), -1)
        for number, row in group:
            choice = row.choice
            if choice.echo and choice.likeliest is not None:
                choice.prompt_tokens = self._prompt_tokens(x_TC, choice.prompt, choice.likeliest)
            if choice.max_tokens == 0:
                choice.close("length")
                self._leave(number)
        self._wake({id(row.job): row.job for _, row in group}.values())

    @torch.no_grad()
    def _prompt_tokens(self, x_TC: Tensor, prompt: Sequence[int], count: int) -> list[WrittenToken]:
        """The tokens of the prompt after the first, each with its log-probability."""
        tokens: list[WrittenToken] = []
        offset, following = 0, prompt[1:]
        for start in range(0, len(following), PROMPT_CHUNK):
            ids = following[start : start + PROMPT_CHUNK]
            rows = self._known(self.decoder.model.logits(x_TC[start : start + len(ids)]))
            for token, (logprob, likeliest) in zip(ids, described(rows, ids, count), strict=True):
                tokens.append(WrittenToken(token, offset, logprob, likeliest))
                offset += len(self.tokenizer.decode([token]))
        return tokens

    def _known(self, logits_SV: Tensor) -> Tensor:
        return logits_SV[:, : self.tokenizer.vocab_size].cpu()

    def _step(self) -> None:
        """Draw a token for every row in use, then decode those that go on."""
        in_use = self._in_use()
        rows = [row for row in self._rows if row is not None]
        if self._options is None:
            self._options = RowOptions.of([row.choice.options for row in rows])
        logits_SV = self._logits[: len(rows)] if in_use == list(range(len(rows))) else self._logits[in_use]
        uniform_S = torch.tensor([row.choice.next_uniform() for row in rows], dtype=torch.float64)
        drawn = choose_each(logits_SV, self._options, uniform_S).tolist()
        self._write(rows, drawn, logits_SV)
        tokens = [NO_TOKEN] * (in_use[-1] + 1)
        for number, row, token in zip(in_use, rows, drawn, strict=True):
            if row.choice.ending is None:
                tokens[number] = token
            else:
                with self._changed:
                    self._leave(number)
        jobs = {id(row.job): row.job for row in rows}.values()
        self._wake(job for job in jobs if job.stream or job.done)
        while tokens and tokens[-1] == NO_TOKEN:
            tokens.pop()
        if tokens:
            next_S = torch.tensor(tokens, device=self.decoder.device)
            self._logits[: len(tokens)] = self._known(self.decoder.step(next_S))
            self.steps += 1

    def _write(self, rows: Sequence[Row], drawn: Sequence[int], logits_SV: Tensor) -> None:
        """Add to each text the token that was drawn for it."""
        for at, (row, token) in enumerate(zip(rows, drawn, strict=True)):
            choice = row.choice
            if token == self.tokenizer.end_of_text:
                choice.close("stop")
            elif choice.likeliest is None:
                choice.add(WrittenToken(token, choice.offset))
            else:
                ((logprob, likeliest),) = described(logits_SV[at : at + 1], [token], choice.likeliest)
                choice.add(WrittenToken(token, choice.offset, logprob, likeliest))

    def _wake(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.stream or job.done:
                job.wake()


def described(
    logits_SV: Tensor, tokens: Sequence[int], count: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row the log-probability of its token, and the `count` likeliest tokens with theirs.

    The model's own, before temperature, top-k and top-p.
    """
    logprobs_SV = logits_SV.double().log_softmax(dim=-1)
    own = logprobs_SV[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    values, ids = logprobs_SV.topk(min(count, logprobs_SV.size(-1)), dim=-1)
    pairs = [tuple(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return list(zip(own, pairs, strict=True))
