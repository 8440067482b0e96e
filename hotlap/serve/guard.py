"""Who may ask: the Host and Origin headers, the token, the size of a body and the time it may take.

A page of another site can make a browser send requests here, and can point a host name of its own to this
address (DNS rebinding). The former carry an Origin, the latter a Host that nobody here goes by.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hotlap.serve.api_error import ApiError

LARGEST_BODY = 2**20  # bytes
# A larger body is still received up to this size, and thrown away: a client that is cut off while it sends
# sees a broken connection instead of the reason.
LARGEST_DISCARDED = 64 * 2**20
BODY_SECONDS = 20.0
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


class Guard:
    def __init__(self, app: ASGIApp, *, token: str | None, names: HostNames) -> None:
        self.app = app
        self.token = token
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self.check(Headers(scope=scope), scope["path"])
        except ApiError as error:
            answer = JSONResponse(error.as_json(), error.status, error.headers)
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def check(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "")
        if not self.names.allow(host):
            raise ApiError(
                "This server does not go by the host name of the request; --allow-host adds one.",
                status=403,
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise ApiError("Pages of other sites may not ask here.", status=403, code="origin_not_allowed")
        if self.token is not None and path.startswith("/v1/"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), self.token.encode()):
                raise ApiError(
                    "Incorrect API key provided: this server was started with a token.",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )


class HostNames:
    """The names of the Host header that are this server's."""

    def __init__(self, bound_to: str, extra: Iterable[str] = ()) -> None:
        self.only_loopback = is_loopback(bound_to)
        self._names = LOOPBACK_NAMES | {name.lower() for name in extra}
        if not self.only_loopback:
            self._names |= {bound_to.lower(), socket.gethostname().lower()}

    def allow(self, host: str) -> bool:
        """With any port, so that a tunnel may have another. An address cannot be pointed elsewhere."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._names or (not self.only_loopback and is_address(name))


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


async def read_body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError("The Content-Type of a request must be application/json.", status=415)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _received(request)
    except TimeoutError:
        raise ApiError("The request's body took too long to arrive.", status=408) from None
    except ClientDisconnect:
        raise ApiError("The client has gone.", status=499) from None


async def _received(request: Request) -> bytes:
    size, body = 0, bytearray()
    async for part in request.stream():
        size += len(part)
        if size <= LARGEST_BODY:
            body += part
        elif size > LARGEST_DISCARDED:
            break
        else:
            body.clear()
    if size > LARGEST_BODY:
        raise ApiError(
            f"The request is too large: at most {LARGEST_BODY:,} bytes are taken.",
            status=413,
            code="request_too_large",
        )
    return bytes(body)
