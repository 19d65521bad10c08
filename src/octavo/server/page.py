"""The built-in page for browsers: its files, and the headers that keep everything else out of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import Response

from octavo.server.endpoints import Endpoint, NestedDialect
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.server.call import Call
    from octavo.server.serving import Serving

__all__ = ["endpoints", "index", "wants_page"]

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

# Only files of this server, no inline script or style, nothing framed, and requests to this server alone.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Kept by the browser, but asked about each time: after an upgrade no old script meets a new page.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: Mapping[str, str]


@cache
def _files() -> dict[str, _File]:
    """Every file of the page by name: a few tens of kilobytes, read once."""
    found = {}
    for item in (files("octavo") / "ui").iterdir():
        media_type = _MEDIA_TYPES.get(item.name.rpartition(".")[2])
        if media_type is not None:
            content = item.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[item.name] = _File(content, {**_HEADERS, "Content-Type": media_type, "ETag": etag})
    return found


def wants_page(headers: Mapping[str, str]) -> bool:
    """Whether the client of ``GET /`` is a browser that opens the page: its Accept header names text/html."""
    return any(part.partition(";")[0].strip().lower() == "text/html" for part in headers.get("accept", "").split(","))


def _answer(call: Call, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise Failure(Kind.not_found, f"There is no /ui/{name[:100]}.", code="not_found")
    known = call.request.headers.get("if-none-match", "")
    if file.headers["ETag"] in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


async def index(call: Call) -> Response:
    """The page itself. What ``GET /`` answers depends on the Accept header, which caches must know."""
    response = _answer(call, "index.html")
    response.headers["Vary"] = "Accept"
    return response


async def _file(call: Call) -> Response:
    return _answer(call, call.request.path_params["name"])


def endpoints(serving: Serving) -> list[Endpoint]:
    """The files of the page. They hold nothing secret, and a browser that opens a page cannot send a key."""
    return [
        Endpoint(
            method="GET",
            path="/ui/{name}",
            handler=_file,
            dialect=NestedDialect(),
            summary="A file of the page for browsers",
            answer="text/html",
            guarded=False,
        )
    ]
