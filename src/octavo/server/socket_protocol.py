"""uvicorn's WebSocket protocol with bounds on what waits for a client that does not read, and on how long it may."""

from __future__ import annotations

import asyncio
from asyncio.transports import BaseTransport
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState

__all__ = ["BoundedSocketProtocol"]


class BoundedSocketProtocol(WebSocketsSansIOProtocol):
    """At most ``write_buffer_bytes`` wait for the client; when none go out for ``write_timeout`` s, it is cut off."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        write_buffer_bytes: int,
        write_timeout: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._write_buffer_bytes = write_buffer_bytes
        self._write_timeout = write_timeout
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: BaseTransport) -> None:
        """The connection was taken over."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=self._write_buffer_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over, whoever ended it."""
        self._stop_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not keep up with what is written to it."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self._stop_timer()

    def keepalive_timeout(self) -> None:
        """No answer came to a ping: nobody is there to read what is left."""
        super().keepalive_timeout()
        self.transport.abort()

    def _watch_reader(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._write_timeout, self._stalled)

    def _stalled(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
