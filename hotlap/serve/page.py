"""The page at `/`: its files, each under an address of its own, since its policy forbids inline code."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Nothing but this server's own files, and no request elsewhere.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def page_routes() -> list[Route]:
    return [
        file_route("/", "html", own_file("page.html")),
        # The look of the reports, then what is this page's own.
        file_route("/page.css", "css", read_file("hotlap.report", "page.css") + own_file("page.css")),
        file_route("/page.js", "js", own_file("page.js")),
    ]


def own_file(name: str) -> str:
    return read_file("hotlap.serve", name)


def read_file(package: str, name: str) -> str:
    return (resources.files(package) / name).read_text(encoding="utf-8")


def file_route(address: str, kind: str, content: str) -> Route:
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }

    async def send(_request: Request) -> Response:
        return Response(content, media_type=KINDS[kind], headers=headers)

    return Route(address, send)
