"""The sockets the server listens on, and the HTTP server on them: start, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
import stat
from typing import TYPE_CHECKING, cast

import uvicorn
from uvicorn.server import ServerState

from octavo.errors import ConfigError
from octavo.server.connections import ConnectionLimits, GuardedProtocol
from octavo.server.socket_protocol import BoundedSocketProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from octavo.server.options import ServerOptions

__all__ = ["HttpServer", "bind", "tls_context"]

_BACKLOG = 2048


def bind(options: ServerOptions) -> list[socket.socket]:
    """Sockets bound to where the server is to listen, which they do not yet; a ConfigError when they cannot be."""
    if options.uds is not None:
        return [_bind_unix(options.uds)]
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {options.host} is not an address of this machine: {error}") from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if options.port == 0:
        addresses = addresses[:1]  # a free port of one address may be taken on the next
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in addresses:
        try:
            sockets.append(_bind_tcp(family, address, options))
        except OSError as error:
            # localhost has an address of IPv6 also where there is no IPv6; the other one does.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                absent = error
                continue
            for bound in sockets:
                bound.close()
            raise ConfigError(_why(error, options)) from error
    if absent is not None and not sockets:
        raise ConfigError(_why(absent, options)) from absent
    return sockets


def _bind_tcp(family: int, address: object, options: ServerOptions) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Connections inherit these. With little room in the kernel a reader that does not read is noticed soon.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.write_buffer_bytes)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        bound.bind(address)  # type: ignore[arg-type]
        # Binding succeeds beside another socket that is bound but does not listen, so only listening settles it; what
        # connects before the server runs waits in the backlog.
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def _bind_unix(path: str) -> socket.socket:
    """A socket left by a server that is gone is taken away; any other file is not."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"uds {path} is a file that is no socket: choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) == 0:
                raise ConfigError(f"uds {path} is in use by another server")
        os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise ConfigError(f"uds {path} cannot be made: {error.strerror or error}") from error
    bound.setblocking(False)
    return bound


def _why(error: OSError, options: ServerOptions) -> str:
    where = f"port {options.port} of {options.host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another program: choose another with --port, or 0 for a free one"
    if error.errno == errno.EACCES:
        return f"{where} may not be used by this user: choose one above 1023 with --port"
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"host {options.host} is not an address of this machine"
    return f"{where} cannot be listened on: {error.strerror or error}"


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """TLS with the certificate of the options, None without one; a ConfigError when it cannot be used."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A callback in any case: without one OpenSSL would ask for the password of a locked key on the terminal.
    password = options.ssl_keyfile_password or ""
    for option, name in (("ssl_certfile", options.ssl_certfile), ("ssl_keyfile", options.ssl_keyfile)):
        try:
            if name is not None:
                with open(name, "rb"):
                    pass
        except OSError as error:
            raise ConfigError(f"{option} {name} cannot be read: {error.strerror}") from error
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: password)
    except (ssl.SSLError, OSError, ValueError) as error:
        files = " and ".join(name for name in (options.ssl_certfile, options.ssl_keyfile) if name is not None)
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{files}: no certificate and key that belong together ({reason})") from error
    return context


class HttpServer:
    """Answers HTTP on sockets that are bound, in the running event loop. ``connections`` are those that are open."""

    def __init__(self, app: ASGIApp, options: ServerOptions, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._options = options
        sockets_made = functools.partial(
            BoundedSocketProtocol,
            write_buffer_bytes=options.write_buffer_bytes,
            write_timeout=options.write_timeout,
        )
        self._config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            ws=cast("type[asyncio.Protocol]", sockets_made),
            ws_max_size=options.max_body_bytes,
            ws_per_message_deflate=False,
            timeout_keep_alive=max(1, int(options.idle_timeout)),
        )
        self._config.load()
        self._tls = tls_context(options)
        self._state = ServerState()
        self.limits = ConnectionLimits(
            max_connections=options.max_connections,
            max_header_bytes=options.max_header_bytes,
            header_timeout=options.header_timeout,
            idle_timeout=options.idle_timeout,
            write_timeout=options.write_timeout,
            write_buffer_bytes=options.write_buffer_bytes,
        )
        self._servers: list[asyncio.Server] = []

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._state.connections)

    @property
    def port(self) -> int | None:
        """The port it listens on, None for a Unix socket."""
        if self._options.uds is not None:
            return None
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where it is reached, as a person would type it."""
        if self._options.uds is not None:
            return f"unix:{self._options.uds}"
        host = self._options.host
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self._tls is None else 'https'}://{shown}:{self.port}"

    async def start(self) -> None:
        """Listen; a ConfigError when another program was faster."""
        loop = asyncio.get_running_loop()

        def connection() -> GuardedProtocol:
            return GuardedProtocol(self.limits, self._config, self._state, loop)

        handshake = self._options.header_timeout if self._tls is not None else None
        for bound in self._sockets:
            try:
                self._servers.append(
                    await loop.create_server(
                        connection,
                        sock=bound,
                        ssl=self._tls,
                        backlog=_BACKLOG,
                        ssl_handshake_timeout=handshake,
                    )
                )
            except OSError as error:
                raise ConfigError(_why(error, self._options)) from error

    async def stop(self, flush: float) -> None:
        """Close the sockets, and connections once what is written has gone out, after ``flush`` seconds in any case."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.transport.close()
        deadline = asyncio.get_running_loop().time() + flush
        while self._state.connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=flush)
        for bound in self._sockets:
            bound.close()
        if self._options.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._options.uds)
