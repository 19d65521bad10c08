"""The front end's side of an engine: one in this process, or one in a process of its own that can be replaced.

A link takes commands from any thread and gives frames to the one thread that calls `receive`. The dispatcher works with
either kind alike.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import octavo.errors
from octavo.engine.channel import Channel, ChannelClosedError
from octavo.engine.messages import (
    Add,
    Command,
    EngineInfo,
    Failed,
    Frame,
    FromEngine,
    Heartbeat,
    Start,
    Started,
    wire_request,
)
from octavo.engine.request import EngineRequest
from octavo.engine.service import EngineService
from octavo.errors import EngineDeadError, OctavoError

if TYPE_CHECKING:
    from octavo.frontend.loading import LoadedModel

__all__ = ["EngineLink", "EngineLostError", "LocalLink", "ProcessLink", "engine_info"]

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 1.0  # that an engine has to end by itself; it keeps nothing that could be lost
_FRESH_HEARTBEATS = 3  # heartbeats that may be missed before the engine counts as not alive


def engine_info(loaded: LoadedModel) -> EngineInfo:
    """What the front end has to know of an engine in this process."""
    config = loaded.engine.config
    return EngineInfo(
        os.getpid(),
        loaded.vocab_size,
        loaded.max_model_len,
        config.num_blocks,
        config.block_size,
        loaded.memory_report,
        dict(loaded.config),
        dict(loaded.generation_config),
        loaded.isa,
        loaded.threads,
        loaded.tuning.hits,
        loaded.tuning.misses,
    )


class EngineLostError(Exception):
    """The engine's process died, hung or said that it cannot go on; the message says which."""


class EngineLink(Protocol):
    """What the dispatcher needs of an engine."""

    @property
    def info(self) -> EngineInfo:
        """Sizes and limits of the engine that runs, or ran last."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and has given a sign of life lately."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request (any thread)."""
        ...

    def send(self, command: Command) -> None:
        """Give the engine a command (any thread). Lost without error when the engine is."""
        ...

    def receive(self) -> Frame | Started | None:
        """Wait for the next frame, or word of what it is going to be about; None when something else woke the thread.

        Raises `EngineLostError`.
        """
        ...

    def wake(self) -> None:
        """Have `receive` return (any thread)."""
        ...

    def stop(self) -> None:
        """Have whatever waits for the engine return soon, since it is going to be closed (any thread)."""
        ...

    def restart(self) -> EngineInfo:
        """Replace a lost engine; raises what its start raised."""
        ...

    def close(self) -> None:
        """End the engine and free what it holds."""
        ...


class LocalLink:
    """An engine in this process, stepped by the thread that calls `receive`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.service = EngineService(loaded.engine)
        self.info = engine_info(loaded)
        self._close = loaded.close
        self._condition = threading.Condition()
        self._commands: list[Command | EngineRequest] = []
        self._woken = False
        self.failed = False

    @property
    def alive(self) -> bool:
        return not self.failed

    def add(self, request: EngineRequest) -> None:
        self._put(request)

    def send(self, command: Command) -> None:
        self._put(command)

    def _put(self, item: Command | EngineRequest) -> None:
        with self._condition:
            self._commands.append(item)
            self._condition.notify()

    def receive(self) -> Frame | None:
        service = self.service
        with self._condition:
            while not (self._commands or self._woken or service.has_work()):
                self._condition.wait()
            self._woken = False
            commands, self._commands = self._commands, []
        try:
            for command in commands:
                if isinstance(command, EngineRequest):
                    service.add(command)
                else:
                    service.apply(command)
            return service.turn() if service.has_work() else None
        except BaseException:
            self.failed = True
            raise

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    stop = wake

    def restart(self) -> EngineInfo:
        raise EngineDeadError("an engine in this process cannot be replaced")

    def close(self) -> None:
        self._close()


class ProcessLink:
    """An engine in a process of its own, joined by a socket pair.

    ``heartbeat_seconds`` is how often it must give a sign of life; without any for ``hang_seconds`` (the whole process
    is stopped), or with one step running for ``step_seconds`` (it is stuck in native code), it is killed and lost.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        heartbeat_seconds: float = 1.0,
        hang_seconds: float = 10.0,
        step_seconds: float = 600.0,
        start_seconds: float = 3600.0,
    ) -> None:
        self._options = options
        self._heartbeat_seconds = heartbeat_seconds
        self._hang_seconds = hang_seconds
        self._step_seconds = step_seconds
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[FromEngine] | None = None
        self._ready = False
        self._last_sign = 0.0
        self._silence = 0.0
        self._closed = False
        self._info: EngineInfo | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def alive(self) -> bool:
        patience = _FRESH_HEARTBEATS * self._heartbeat_seconds
        return self._ready and time.monotonic() - self._last_sign < patience

    @property
    def pid(self) -> int | None:
        """The engine's process id, None when there is none."""
        return None if self._process is None else self._process.pid

    def launch(self) -> None:
        """Start the process; it loads its model while the caller does other things (see `ready`)."""
        ours, theirs = socket.socketpair()
        with theirs:
            # -c rather than -m, which would import the package's own modules under another name first.
            code = f"import sys; from octavo.frontend.engine_process import main; sys.exit(main({theirs.fileno()}))"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
            )
        channel: Channel[FromEngine] = Channel(ours, FromEngine)
        with contextlib.suppress(ChannelClosedError):  # noticed by `ready`
            channel.send(Start(self._options, self._heartbeat_seconds))
        self._last_sign = time.monotonic()
        self._silence = 0.0
        self._channel = channel

    def ready(self) -> EngineInfo:
        """Wait until the model is loaded. Raises the engine's own error when it cannot be."""
        channel = self._channel
        assert channel is not None
        deadline = time.monotonic() + self._start_seconds
        while not self._closed:
            try:
                message = channel.receive(1.0)
            except ChannelClosedError:
                raise EngineDeadError(f"the engine could not start: its process {self._reap()}") from None
            self._last_sign = time.monotonic() if message is not None else self._last_sign
            if isinstance(message, EngineInfo):
                self._info = message
                self._ready = True
                # Its successors must be able to take over every request, so they get a KV cache of the same size.
                self._options |= {
                    "num_gpu_blocks_override": message.num_blocks,
                    "kv_cache_bytes": None,
                    "max_model_len": message.max_model_len,
                }
                return message
            if isinstance(message, Failed):
                self._reap()
                raise _error(message)
            now = time.monotonic()
            if now > deadline or now - self._last_sign > max(60.0, self._hang_seconds):
                self._kill()
                raise EngineDeadError("the engine could not start: it gave no sign of life")
        raise EngineDeadError("closed while the engine started")

    def add(self, request: EngineRequest) -> None:
        self.send(Add(wire_request(request)))

    def send(self, command: Command) -> None:
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(ChannelClosedError):  # the reading thread notices and replays
                channel.send(command)

    def receive(self) -> Frame | Started | None:
        channel = self._channel
        assert channel is not None
        began = time.monotonic()
        try:
            message = channel.receive(self._heartbeat_seconds)
        except ChannelClosedError:
            raise self._lost(f"the engine's process {self._reap()}") from None
        except Exception as error:  # what a dying or damaged process wrote last cannot be read
            self._kill()
            raise self._lost(f"the engine sent an unreadable message: {error}") from error
        now = time.monotonic()
        if message is None:
            # Silence counts only while this process was there to hear: if both were stopped (a suspended machine, a
            # debugger), the engine is given time to speak again.
            self._silence += min(now - began, 2 * self._heartbeat_seconds)
            if self._silence > self._hang_seconds:
                self._kill()
                raise self._lost(f"the engine gave no sign of life for {self._hang_seconds:g} s and was killed")
            return None
        self._last_sign = now
        self._silence = 0.0
        if isinstance(message, (Frame, Started)):
            return message
        if isinstance(message, Failed):
            self._reap()
            raise self._lost(f"the engine stopped on an error: {message.message}")
        if isinstance(message, Heartbeat) and message.step_seconds > self._step_seconds:
            self._kill()
            raise self._lost(f"one step of the engine took more than {self._step_seconds:g} s and it was killed")
        return None

    def wake(self) -> None:
        channel = self._channel  # which the dispatcher's thread takes away when it replaces the engine
        if channel is not None:
            channel.wake()

    def stop(self) -> None:
        self._closed = True
        self.wake()

    def restart(self) -> EngineInfo:
        self._drop()
        self.launch()
        return self.ready()

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        """Close the socket, on which the engine ends; kill it if it does not."""
        self._ready = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process = self._process
        if process is not None:
            try:
                process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()
            self._process = None

    def _lost(self, reason: str) -> EngineLostError:
        self._ready = False
        return EngineLostError(reason)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _reap(self) -> str:
        """How the process ended, in words; it is killed if it has not although its socket is closed."""
        process = self._process
        if process is None:
            return "is gone"
        try:
            code = process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._kill()
            return "closed its socket and was killed"
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else str(-code)
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"was killed by {name}{hint}"
        return f"ended with code {code}"


def _environment() -> dict[str, str]:
    """The child's: it must find the same octavo, also one that is on this process's path only."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment


def _error(failed: Failed) -> OctavoError:
    """The error the engine's process ended with. Those with fields of their own come as their plain base."""
    kind = getattr(octavo.errors, failed.error, EngineDeadError)
    if kind in (octavo.errors.ParameterError,):
        kind = octavo.errors.ConfigError
    error: OctavoError = kind(failed.message)
    return error
