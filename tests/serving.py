"""A server of the run at `pico` on this machine, in a thread of this process, and requests to it."""

from __future__ import annotations

import functools
import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hotlap.inference.load import LoadedModel, load
from hotlap.serve.app import Served, build_app
from hotlap.serve.engine import Engine
from hotlap.serve.guard import HostNames
from hotlap.serve.page import page_routes
from hotlap.serve.server import address_of, listen, make_server, serve
from tests.trained_run import trained_run

CONTEXT = 512


@functools.cache
def loaded_run() -> LoadedModel:
    return load(trained_run(), device="cpu")


class Running:
    def __init__(self, url: str, models: Sequence[Served]) -> None:
        self.url = url
        self.models = models
        self.port = int(url.rstrip("/").rpartition(":")[2])

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and parsed JSON of an answer; the body may be bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        described = {"Content-Type": "application/json", **headers} if content is not None else headers
        connection.request(method, path, content, described)
        answer = connection.getresponse()
        status, text = answer.status, answer.read()
        connection.close()
        return status, json.loads(text) if answer.headers["content-type"] == "application/json" else text

    def complete(self, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", {"model": "lap", **body})


@contextmanager
def running(
    *, rows: int = 8, queue: int = 8, names: Sequence[str] = ("lap",), **options: Any
) -> Iterator[Running]:
    models = [Served(name, Engine(loaded_run(), rows, queue), CONTEXT) for name in names]
    bound = listen("127.0.0.1", 0)
    app = build_app(models, names=HostNames("127.0.0.1"), pages=page_routes(), **options)
    server = make_server(app, models)
    started = threading.Event()
    thread = threading.Thread(target=serve, args=(server, bound, started.set))
    thread.start()
    started.wait()
    try:
        yield Running(address_of(bound), models)
    finally:
        server.should_exit = True
        thread.join()
