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
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from hotlap.errors import HotlapError, ReportError
from hotlap.report.analysis import RunsByLabel, label_runs
from hotlap.report.page import build_content, encoded, render_page
from hotlap.runs.reader import RunFiles, load_run

LOOPBACK = "127.0.0.1"
NEWS = "/news.json"
MAX_CONNECTIONS = 32  # at a time; a page needs one or two
TIMEOUT_SECONDS = 10.0  # for each part of a request; a browser sends it at once


class Watched(Protocol):
    """What a page is made of while it grows."""

    title: str

    def read(self) -> tuple[RunsByLabel, list[str]]:
        """The runs by label and the notes on them, as they are at the moment. Raises what is wrong."""

    def directories(self) -> list[Path]:
        """Of the runs; they need not exist."""


class WatchedRun:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.title = directory.resolve().name

    def read(self) -> tuple[RunsByLabel, list[str]]:
        return label_runs([load_run(self.directory)]), []

    def directories(self) -> list[Path]:
        return [self.directory]


class LiveServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watched: Watched, port: int = 0) -> None:
        """Port 0 takes a free one. Raises if there is nothing to read."""
        watched.read()
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

    def version(self) -> str:
        """A text that changes whenever a file of a run does."""
        digest = hashlib.sha256()
        for run in map(RunFiles, self.watched.directories()):
            for path in (run.config_path, run.environment_path, run.metrics_path, run.summary_path):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="replace"))
        return digest.hexdigest()


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
        if url.path == "/":
            self._page()
        elif url.path == NEWS:
            self._news(parse_qs(url.query).get("version", [""])[0])
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is one page here: /\n")

    def _page(self) -> None:
        try:
            runs_by_label, notes = self.server.watched.read()
            page = render_page(runs_by_label, self.server.watched.title, notes=notes, live_url=NEWS)
        except HotlapError as mistake:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", encoded(f"{mistake}\n"))
            return
        self._answer(HTTPStatus.OK, "text/html", encoded(page))

    def _news(self, known_version: str) -> None:
        # Before reading: lines that are appended meanwhile change the version, so the next request gets them.
        version = self.server.version()
        if version == known_version:
            self._answer(HTTPStatus.NO_CONTENT, "application/json", b"")
            return
        try:
            runs_by_label, notes = self.server.watched.read()
            news = build_content(runs_by_label, notes=notes)
        except HotlapError as mistake:
            news = {"error": str(mistake)}
        self._answer(HTTPStatus.OK, "application/json", json.dumps({**news, "version": version}).encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Requests are not logged."""
