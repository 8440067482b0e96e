"""The server's addresses: the API's and the page's.

A request is checked, submitted to the engine of its model, and answered as it is written. Whatever ends it (a
client that hangs up, a time-out, an error), its texts leave their rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from hotlap.errors import HotlapError
from hotlap.serve.answers import Answer, model_card
from hotlap.serve.api_error import ApiError
from hotlap.serve.choice import Choice
from hotlap.serve.engine import Engine, Job, QueueFullError
from hotlap.serve.fields import CompletionRequest, parse_json, parse_request
from hotlap.serve.guard import Guard, HostNames, read_body

DONE = b"data: [DONE]\n\n"


class Served:
    """A model under the name that requests use for it."""

    def __init__(self, name: str, engine: Engine, context_tokens: int) -> None:
        self.name = name
        self.engine = engine
        self.context_tokens = context_tokens
        self.created = int(time.time())

    def card(self) -> dict[str, Any]:
        loaded = self.engine.loaded
        return {
            **model_card(self.name, self.created),
            "context_tokens": self.context_tokens,
            "vocab_size": self.engine.tokenizer.vocab_size,
            "step": loaded.step,
        }

    def choices(self, asked: CompletionRequest) -> list[Choice]:
        """The texts that a request asks for, `n` for each of its prompts."""
        count = asked.options.num_samples
        limit = self.engine.num_rows + self.engine.queue_limit
        if len(asked.prompts) * count > limit:
            raise ApiError(f"A request may ask for at most {limit} texts.", param="n")
        choices: list[Choice] = []
        for prompt in asked.prompts:
            ids = self.prompt_ids(prompt, asked.max_tokens)
            for draw in range(count):
                choice = Choice(
                    len(choices),
                    ids,
                    asked.options,
                    self.engine.tokenizer,
                    max_tokens=asked.max_tokens,
                    draw=draw,
                    stop=asked.stop,
                    likeliest=asked.likeliest,
                    echo=asked.echo,
                )
                choices.append(choice)
        return choices

    def prompt_ids(self, prompt: str | tuple[int, ...], max_tokens: int) -> list[int]:
        """With the end-of-text token in front, which starts a document."""
        tokenizer = self.engine.tokenizer
        ids = tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else list(prompt)
        wrong = next((one for one in ids if not 0 <= one < tokenizer.vocab_size), None)
        if wrong is not None:
            raise ApiError(f"Token ids go from 0 to {tokenizer.vocab_size - 1}.", param="prompt")
        if ids[:1] != [tokenizer.end_of_text]:
            ids = [tokenizer.end_of_text, *ids]
        if len(ids) + max_tokens > self.context_tokens:
            raise ApiError(
                f"This model's maximum context length is {self.context_tokens} tokens, but the request has"
                f" {len(ids) + max_tokens}: {len(ids)} of the prompt and {max_tokens} of `max_tokens`.",
                param="prompt",
                code="context_length_exceeded",
            )
        return ids


class Progress:
    """A job on the event loop's side: waits for news of it, until a deadline."""

    def __init__(
        self, served: Served, asked: CompletionRequest, choices: Sequence[Choice], seconds: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
                loop.call_soon_threadsafe(self._news.set)

        self.answer = Answer(served.name, served.engine.tokenizer)
        self.asked = asked
        self.choices = choices
        self._seconds = seconds
        self._until = loop.time() + seconds
        self.job = Job(choices, wake, stream=asked.stream)
        try:
            served.engine.submit(self.job)
        except QueueFullError:
            raise ApiError(
                "The server is busy: as many texts wait as its queue holds. Try again later.",
                status=429,
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            ) from None

    async def wait(self) -> None:
        """Until there is something new. Raises what ended the job."""
        try:
            async with asyncio.timeout_at(self._until):
                await self._news.wait()
        except TimeoutError:
            raise ApiError(
                f"The request took more than {self._seconds:g} s.", status=504, code="timeout"
            ) from None
        self._news.clear()
        failure = self.job.failure
        if isinstance(failure, ConnectionAbortedError):
            raise ApiError("The server is stopping.", status=503)
        if failure is not None:
            told = (
                str(failure) if isinstance(failure, HotlapError) else "The server failed to write this text."
            )
            raise ApiError(told, status=500)

    async def whole(self) -> dict[str, Any]:
        while not self.job.done:
            await self.wait()
        return self.answer.completion(self.choices)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: what was written since the last one, however many tokens that is."""
        fresh = [True] * len(self.choices)
        while True:
            await self.wait()
            done = self.job.done
            described = []
            for number, choice in enumerate(self.choices):
                piece = choice.take()
                if piece.text or piece.tokens or piece.ending or (fresh[number] and choice.prompt_tokens):
                    described.append(self.answer.choice(choice, piece, is_first=fresh[number]))
                    fresh[number] = False
            chunks = [self.answer.chunk([one], with_usage=self.asked.stream_usage) for one in described]
            if done and self.asked.stream_usage:
                chunks.append(self.answer.usage_chunk(self.choices))
            if chunks:
                yield b"".join(map(event, chunks)) + (DONE if done else b"")
            if done:
                return


class EventStream(Response):
    """Sends a job's events until it is done or the client hangs up."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        await until_done_or_gone(writing, receive, self._progress.job)

    async def _write(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for content in self._progress.events():
                await send({"type": "http.response.body", "body": content, "more_body": True})
        except ApiError as error:
            body = event(error.as_json())
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_done_or_gone(work: asyncio.Future[Any], receive: Receive, job: Job) -> None:
    """Wait for the work; once the client has hung up, end it and free the job's rows."""
    gone = asyncio.ensure_future(receive())  # the body has been read: what comes next is the end
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        job.cancel()
        for task in (work, gone):
            if not task.done():
                task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await work


def event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Api:
    def __init__(self, models: Sequence[Served], timeout_seconds: float) -> None:
        self.models = {served.name: served for served in models}
        self.timeout_seconds = timeout_seconds

    async def list_models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [one.card() for one in self.models.values()]})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(self.find(request.path_params["name"]).card())

    async def health(self, _request: Request) -> Response:
        """What the engines do at the moment."""
        engines = {name: served.engine for name, served in self.models.items()}
        return JSONResponse(
            {
                name: {"writing": engine.writing, "waiting": engine.waiting, "steps": engine.steps}
                for name, engine in engines.items()
            }
        )

    async def complete(self, request: Request) -> Response:
        content = parse_json(await read_body(request))
        asked = parse_request(content)
        served = self.find(asked.model)
        # Long prompts take a while to tokenize, which must not stop the others.
        choices = await asyncio.to_thread(served.choices, asked)
        progress = Progress(served, asked, choices, self.timeout_seconds)
        if asked.stream:
            return EventStream(progress)
        work = asyncio.ensure_future(progress.whole())
        await until_done_or_gone(work, request.receive, progress.job)
        if work.cancelled():
            return Response(status_code=499)  # nobody is there to read it
        return JSONResponse(work.result())

    async def refuse_chat(self, _request: Request) -> Response:
        raise ApiError(
            "These are base models: they go on with a text and were not trained to chat. Use v1/completions.",
            status=404,
            param="model",
        )

    def find(self, name: str) -> Served:
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(
                f"The model `{name[:100]}` does not exist; this server has {known}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.models[name]


def build_app(
    models: Sequence[Served],
    *,
    names: HostNames,
    token: str | None = None,
    timeout_seconds: float = 300.0,
    pages: Sequence[Route] = (),
) -> Starlette:
    api = Api(models, timeout_seconds)
    return Starlette(
        routes=[
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.show_model),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/v1/chat/completions", api.refuse_chat, methods=["POST"]),
            Route("/health", api.health),
            *pages,
        ],
        middleware=[Middleware(Guard, token=token, names=names)],
        exception_handlers={ApiError: tell, HTTPException: tell_unknown_address, Exception: tell_bug},
    )


async def tell(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for this class"
    return JSONResponse(error.as_json(), error.status, error.headers)


async def tell_unknown_address(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for this class"
    message = f"Invalid URL ({request.method} {request.url.path[:100]})"
    return await tell(request, ApiError(message, status=error.status_code))


async def tell_bug(request: Request, _error: Exception) -> Response:
    return await tell(request, ApiError("The server failed on this request.", status=500))
