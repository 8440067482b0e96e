"""The listening socket and the life of the server around the app: start, address, Ctrl-C, the end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from hotlap.errors import ConfigError
from hotlap.serve.app import Served
from hotlap.serve.guard import is_loopback

# Far above what rows and queue can serve; it bounds what idle connections cost.
MAX_CONNECTIONS = 512
GOODBYE_SECONDS = 3
LARGEST_PORT = 65535


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound; port 0 takes a free one."""
    with contextlib.ExitStack() as unless_bound:
        try:
            if not 0 <= port <= LARGEST_PORT:  # getaddrinfo would take the remainder
                raise OverflowError(f"no port from 0 to {LARGEST_PORT}")
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            bound = unless_bound.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                expected=f"an address to listen on, port {port} of {host}",
                found=str(error),
                do="give another --port or --host",
            ) from None
        unless_bound.pop_all()
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    shown = "localhost" if host in ("0.0.0.0", "::") else host
    return f"http://[{shown}]:{port}/" if ":" in shown else f"http://{shown}:{port}/"


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, models: Sequence[Served]) -> None:
        super().__init__(config)
        self.models = models

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At the first signal the texts that are being written end, so that their requests do."""
        for served in self.models:
            served.engine.stop()
        super().handle_exit(sig, frame)


def make_server(app: ASGIApp, models: Sequence[Served]) -> Server:
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GOODBYE_SECONDS,
        server_header=False,
        ws="none",
    )
    return Server(config, models)


def serve(server: Server, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Until Ctrl-C, SIGTERM or `should_exit`. `ready` is called before the first request."""
    for served in server.models:
        served.engine.start()
    try:
        ready()
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[bound])
    finally:
        for served in server.models:
            served.engine.close()
        bound.close()


def must_have_token(host: str, token: str | None) -> None:
    if not is_loopback(host) and not token:
        raise ConfigError(
            expected=f"a token, since {host} can be reached from other machines",
            found="none",
            do="give --token, or set HOTLAP_SERVE_TOKEN",
        )
