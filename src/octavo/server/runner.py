"""Runs the server: loads the engine, listens, and ends in order when a signal says so or the engine is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from octavo import __version__
from octavo.errors import ConfigError
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.options import DEFAULT_MODEL
from octavo.frontend.pooling import is_encoder
from octavo.observability import logs
from octavo.observability.metrics import Metrics
from octavo.observability.tracing import Tracer
from octavo.server.app import App, build_app, draining
from octavo.server.listening import HttpServer, bind, tls_context
from octavo.server.options import ENGINE_DEFAULTS, ServerOptions
from octavo.server.security import KeyRing
from octavo.server.serving import Serving
from octavo.weights.hub import resolve_model

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["RunningApp", "make_serving", "run", "serve"]

_log = logging.getLogger(__name__)

# How long answers that are complete, or have just been ended, may take to reach their clients.
_FLUSH_SECONDS = 2.0
_WATCH_SECONDS = 0.5


def make_serving(options: ServerOptions, llm: AsyncLLM | None = None, *, separate_process: bool = True) -> Serving:
    """Start the engine (unless one is given) and put together what the handlers share."""
    names = list(options.served_model_name) or [options.engine.model]
    template = _chat_template(options)
    observer = Metrics(names[0], version=__version__, options=options.engine)
    tracer = None
    if options.otlp_endpoint is not None:
        tracer = Tracer.connect(options.otlp_endpoint, service_name=options.otlp_service_name, version=__version__)
    path = resolve_model(options.engine.model) if llm is None else None
    if path is not None and is_encoder(path):
        from octavo.frontend.encoder import AsyncEncoder

        encoder = AsyncEncoder(**asdict(options.engine))
        return Serving(
            service=encoder, options=options, model_names=names, version=__version__, observer=observer, tracer=tracer
        )
    if llm is None:
        llm = AsyncLLM(
            separate_process=separate_process,
            observer=observer,
            most_unread=options.max_unread_tokens,
            engine_timeout=options.engine_timeout,
            step_timeout=options.step_timeout,
            **asdict(options.engine),
        )
    return Serving(
        service=llm,
        options=options,
        model_names=names,
        version=__version__,
        observer=observer,
        tracer=tracer,
        chat_template=template,
    )


def _chat_template(options: ServerOptions) -> str | None:
    """The text of the chat template option: what it says itself, or what the file has that it names."""
    given = options.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"chat_template {given} cannot be read: {reason}") from error


class RunningApp:
    """The application on its sockets, in the running event loop; ends when it is told to or when its engine is lost."""

    def __init__(self, serving: Serving, sockets: list[socket.socket]) -> None:
        self.serving = serving
        self.app: App = build_app(serving)
        self.http = HttpServer(self.app, serving.options, sockets)
        if serving.observer is not None:
            serving.observer.gauge("octavo:open_connections", "Open HTTP connections.", lambda: self.http.connections)
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()
        self._code = 0

    def signalled(self, number: int) -> None:
        """SIGTERM: drain, the second time stop. SIGINT: stop."""
        if number == signal.SIGTERM and not self._drain.is_set():
            _log.info("draining: %d requests run", len(self.serving.calls))
            self._drain.set()
            return
        self._code = 128 + number
        self._drain.set()
        self._stop.set()

    async def run(self, started: Callable[[], None]) -> int:
        """Serve until the end and give the exit code of the process; ``started`` is called when it listens."""
        await self.http.start()
        watch = asyncio.ensure_future(self._watch_engine())
        try:
            started()
            await self._drain.wait()
            self.serving.draining = True  # from here on requests are refused, those that run go on
            for session in list(self.app.sockets):
                session.drain()
            if not self._stop.is_set():
                await self._finish(self.serving.options.shutdown_timeout)
            await self._end_rest()
            return self._code
        finally:
            watch.cancel()
            await self.http.stop(_FLUSH_SECONDS)

    async def _finish(self, seconds: float) -> None:
        """Wait for the calls that are being answered to end, but not longer, nor when told to stop."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while (self.serving.calls or self.app.sockets) and not self._stop.is_set() and clock() < end:
            await asyncio.sleep(0.02)

    async def _end_rest(self) -> None:
        """End what still runs with a failure its client sees, and leave it the time to go out."""
        if not self.serving.calls:
            return
        count = 0
        for calls in list(self.serving.calls.values()):
            for call in list(calls):
                call.interrupt(draining())
                count += 1
        _log.warning("%d requests did not end in time and were ended", count)
        if self._code == 0:
            self._code = 1
        self._stop.clear()
        await self._finish(_FLUSH_SECONDS)

    async def _watch_engine(self) -> None:
        while self.serving.service.failure is None:
            await asyncio.sleep(_WATCH_SECONDS)
        print(f"octavo: the engine is lost for good: {self.serving.service.failure}", file=sys.stderr, flush=True)
        self._code = 1
        self._drain.set()
        self._stop.set()


def run(options: ServerOptions, report: Callable[[str], None] = print) -> int:
    """Serve until a signal ends it; gives the exit code of the process. ``report`` is told what a person wants to know.

    What is wrong with the options, the port, the keys, the certificate or the model is raised, before anything runs.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a server is ended by signals, which only the main thread receives: call serve there")
    sockets = bind(options)
    try:
        KeyRing.from_options(options)
        tls_context(options)
        logs.configure(options.log_format, options.log_level)
        _raise_file_limit(options.max_connections)
        serving = make_serving(options)
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    try:
        return _loop(serving, sockets, report)
    finally:
        serving.service.shutdown()
        if serving.tracer is not None:
            serving.tracer.close()


def _loop(serving: Serving, sockets: list[socket.socket], report: Callable[[str], None]) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main(serving, sockets, report))


async def _main(serving: Serving, sockets: list[socket.socket], report: Callable[[str], None]) -> int:
    running = RunningApp(serving, sockets)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.signalled, number)

    def started() -> None:
        # What is there now stays: the collector, off while the command started, need not look at it again and again.
        gc.collect()
        gc.freeze()
        gc.enable()
        report(serving.service.memory_report)
        names = ", ".join(serving.model_names)
        report(f"octavo {serving.version} serves {names} at {running.http.url}")

    return await running.run(started)


def _raise_file_limit(connections: int) -> None:
    """Let the process have as many open files as connections are allowed, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def serve(model: str = DEFAULT_MODEL, **options: Any) -> int:
    """Serve a model over HTTP until a signal ends it; gives the exit code.

    Keyword arguments are those of ``EngineOptions`` and ``ServerOptions`` together. It is to be called in the main
    thread of a program, as only that receives signals.
    """
    return run(ServerOptions.from_kwargs(model=model, **(ENGINE_DEFAULTS | options)))
