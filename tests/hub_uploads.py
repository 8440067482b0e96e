"""A local server that takes uploads as the hub does: small files within the commit, large ones as LFS.

`repositories` has what was committed, by name and file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.hub_server import running

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
TOKEN = "hf_for_tests"


class UploadServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.visibility: dict[str, str | None] = {}
        self.large: dict[str, bytes] = {}  # by sha256
        self.commits = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: UploadServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(404, {"error": f"nothing at {self.path}"})

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path == "/api/validate-yaml":  # the head of the card, between two lines of dashes
            card = json.loads(body)["content"]
            errors = [] if re.match(r"---\n(\w+: \S+\n)+---\n", card) else [{"message": "no metadata"}]
            self._answer(200, {"errors": errors, "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular",
                    "shouldIgnore": False,
                }
                for file in files
            ]
            self._answer(200, {"files": modes})
        elif re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", self.path):
            wanted = json.loads(body)["objects"]
            objects = [
                {**file, "actions": {"upload": {"href": f"{self.server.endpoint}/large/{file['oid']}"}}}
                for file in wanted
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": f"nothing at {self.path}"})

    def do_PUT(self) -> None:
        content = self._body()
        assert self.path == f"/large/{hashlib.sha256(content).hexdigest()}", self.path
        self.server.large[self.path.rpartition("/")[2]] = content
        self._answer(200, {})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        address = f"{self.server.endpoint}/{name}"
        if name in self.server.repositories:
            self._answer(409, {"error": "You already created this model repo", "url": address})
            return
        self.server.repositories[name] = {}
        self.server.visibility[name] = wanted.get("visibility")
        self._answer(200, {"url": address, "name": name, "id": "0"})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.server.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        self.server.commits += 1
        address = f"{self.server.endpoint}/{name}/commit/{COMMIT}"
        self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Keep the test's output quiet."""


@contextmanager
def taking_uploads() -> Iterator[UploadServer]:
    with UploadServer() as server, running(server):
        yield server
