"""Cross-origin requests: which origins' pages may call the server from a browser, and what browsers ask before."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

__all__ = ["Cors"]

_METHODS = "GET, POST, OPTIONS"
_EXPOSED = "X-Request-Id, Retry-After"
_MAX_AGE = "600"  # seconds a browser may keep the answer to a preflight


class Cors:
    """The origins that are allowed; without any, no CORS header is ever sent and preflights are plain OPTIONS."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    def _allowed(self, headers: Mapping[str, str]) -> str | None:
        origin = headers.get("origin")
        if origin is None or not self._origins:
            return None
        if self._any:
            return "*"  # keys travel in the Authorization header, never in cookies, so no credentials are allowed
        return origin if origin in self._origins else None

    def preflight(self, headers: Mapping[str, str]) -> Response | None:
        """The answer to a browser's question whether it may send a request, None when it is no such question."""
        if not self._origins or "access-control-request-method" not in headers:
            return None
        allowed = self._allowed(headers)
        if allowed is None:
            return Response(status_code=403)
        wanted = headers.get("access-control-request-headers", "")
        answer = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": wanted or "Authorization, Content-Type, X-Request-Id",
            "Access-Control-Max-Age": _MAX_AGE,
            "Vary": "Access-Control-Request-Headers",
        }
        return Response(status_code=204, headers=answer)

    def add(self, headers: Mapping[str, str], answer: list[tuple[bytes, bytes]]) -> None:
        """Add to an answer's headers what a page of an allowed origin needs to read it."""
        if not self._origins:
            return
        allowed = self._allowed(headers)
        if not self._any:
            answer.append((b"vary", b"Origin"))
        if allowed is not None:
            answer.append((b"access-control-allow-origin", allowed.encode("latin-1")))
            answer.append((b"access-control-expose-headers", _EXPOSED.encode()))
