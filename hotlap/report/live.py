"""`hotlap watch`: serves the report of a run, or of several, while they train, to this machine only.

The server reads only their directories. It listens on the loopback address and checks the Host header, so
that no other web page can read a run through a host name that resolves to this address (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hotlap.errors import HotlapError, ReportError
from hotlap.report.analysis import RunsByLabel, label_runs
from hotlap.report.page import build_content, encoded, render_page
from hotlap.runs.reader import RunFiles, load_run

LOOPBACK = "127.0.0.1"
NEWS = "/news.json"
MAX_CONNECTIONS = 32  # at a time; a page needs one or two
TIMEOUT_SECONDS = 10.0  # for each part of a request; a browser sends it at once

Query = Mapping[str, Sequence[str]]  # of the page's address


class Watched(ABC):
    """What a page is made of while it grows."""

    title: str

    @abstractmethod
    def read(self, query: Query) -> tuple[RunsByLabel, list[str]]:
        """The runs by label and the notes on them, as they are at the moment. Raises what is wrong."""

    @abstractmethod
    def directories(self) -> list[Path]:
        """Of the runs; they need not exist."""

    def picker(self, query: Query) -> str:  # noqa: ARG002
        """A list of runs to tick, as HTML; empty where there is no choice."""
        return ""


class WatchedRun(Watched):
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.title = directory.resolve().name

    def read(self, query: Query) -> tuple[RunsByLabel, list[str]]:  # noqa: ARG002
        return label_runs([load_run(self.directory)]), []

    def directories(self) -> list[Path]:
        return [self.directory]


def stamp_of(directory: Path) -> str:
    """A text that changes whenever a file of the run does."""
    run, parts = RunFiles(directory), []
    for path in (run.config_path, run.environment_path, run.metrics_path, run.summary_path):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            parts.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return "\n".join(parts)


class LiveServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        """Port 0 takes a free one. Raises if there is nothing to read."""
        watched.read({})
        self.watched = watched
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((LOOPBACK, port), LiveHandler)
        except (OSError, OverflowError) as error:
            raise ReportError(
                expected=f"a port to listen on, {port} on {LOOPBACK}",
                found=str(error),
                do="give another --port",
            ) from None

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], address: Any) -> None:
        """Each connection has a thread while it lasts; one too many is closed."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], address: Any
    ) -> None:
        try:
            super().process_request_thread(request, address)
        finally:
            self._free.release()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def version(self, query: Query) -> str:
        """A text that changes whenever a file of a run does, a run begins, or the page asks for others."""
        asked = sorted((name, values) for name, values in query.items() if name != "version")
        stamps = "\n".join([repr(asked), *map(stamp_of, self.watched.directories())])
        return hashlib.sha256(stamps.encode(errors="replace")).hexdigest()


class LiveHandler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = TIMEOUT_SECONDS

    def do_GET(self) -> None:
        if self.headers.get("Host") not in {
            f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")
        }:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This page is for this machine only.\n")
            return
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        if url.path == "/":
            self._page(query)
        elif url.path == NEWS:
            self._news(query)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is one page here: /\n")

    def _page(self, query: Query) -> None:
        watched = self.server.watched
        try:
            runs_by_label, notes = watched.read(query)
            page = render_page(
                runs_by_label, watched.title, notes=notes, live_url=NEWS, picker=watched.picker(query)
            )
        except HotlapError as mistake:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", encoded(f"{mistake}\n"))
            return
        self._answer(HTTPStatus.OK, "text/html", encoded(page))

    def _news(self, query: Query) -> None:
        try:
            # Before reading: lines that are appended meanwhile change the version, so the next request gets
            # them.
            version = self.server.version(query)
            if [version] == query.get("version"):
                self._answer(HTTPStatus.NO_CONTENT, "application/json", b"")
                return
            runs_by_label, notes = self.server.watched.read(query)
            news = build_content(runs_by_label, notes=notes)
            news["fragments"]["picker"] = self.server.watched.picker(query)
            news["version"] = version
        except HotlapError as mistake:
            news = {"error": str(mistake)}
        self._answer(HTTPStatus.OK, "application/json", json.dumps(news).encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not logged."""
