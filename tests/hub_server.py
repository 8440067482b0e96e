"""A local server that speaks as much of the Hugging Face hub's protocol as a download needs.

HEAD and GET of `/datasets/<repository>/resolve/<revision>/<file>`, with the headers that name the revision
and the sha256 of a large file, byte ranges, and on demand a connection that breaks or a byte that flips.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISION = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repository = repository
        self.files = files
        self.break_once: set[str] = set()  # files whose first transfer stops half-way
        self.flip_once: set[str] = set()  # files whose first transfer has a wrong byte
        self.requests: list[tuple[str, str, str | None]] = []  # method, file, range

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, file: str) -> list[str | None]:
        """The ranges that GETs of a file asked for."""
        return [wanted for method, name, wanted in self.requests if (method, name) == ("GET", file)]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        pattern = rf"/datasets/{re.escape(self.server.repository)}/resolve/(?:main|{REVISION})/([^/?]+)"
        match = re.fullmatch(pattern, self.path)
        file = match[1] if match else ""
        wanted = self.headers.get("Range")
        self.server.requests.append((self.command, file, wanted))
        content = self.server.files.get(file)
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if match else "RepoNotFound")
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        range_match = re.fullmatch(r"bytes=(\d+)-", wanted or "")
        start = int(range_match[1]) if range_match else 0
        self.send_response(206 if range_match else 200)
        self.send_header("X-Repo-Commit", REVISION)
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("ETag", '"of-the-pointer-file"')
        self.send_header("Accept-Ranges", "bytes")
        if range_match:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if body:
            self._send(file, content[start:])

    def _send(self, file: str, content: bytes) -> None:
        if file in self.server.flip_once:
            self.server.flip_once.remove(file)
            content = content[:-1] + bytes([content[-1] ^ 1])
        if file in self.server.break_once:
            self.server.break_once.remove(file)
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test's output quiet."""


@contextmanager
def serving(repository: str, files: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer(repository, files) as server, running(server):
        yield server


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    """Answer requests in a thread of its own until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
