"""A link whose engine is lost whenever a test wants it to be, and is replaced by a fresh one on the same script."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from octavo.engine.messages import Add, Command, EngineInfo, Frame, FromEngine, Started, ToEngine, wire_request
from octavo.engine.request import EngineRequest
from octavo.engine.service import EngineService
from octavo.errors import EngineDeadError
from octavo.frontend.engine_link import EngineLostError, engine_info
from octavo.frontend.loading import LoadedModel

__all__ = ["CrashingLink"]


class CrashingLink:
    """Everything crosses as msgpack, as it does between processes. ``crash`` is asked before each frame is given."""

    def __init__(self, load: Callable[[], LoadedModel]) -> None:
        self._load = load
        self.loaded = load()
        self._announced: list[bytes] = []
        self._turned: Frame | None = None
        self.service = self._service()
        self.crash: Callable[[Frame], bool] = lambda frame: False
        self.starts = 1
        self.failing_starts = 0
        self.alive = True
        self._commands: list[bytes] = []
        self._condition = threading.Condition()
        self._woken = False
        self._decode = msgspec.msgpack.Decoder(ToEngine).decode
        self._decode_frame = msgspec.msgpack.Decoder(FromEngine).decode

    def _service(self) -> EngineService:
        return EngineService(
            self.loaded.engine,
            lambda request_ids: self._announced.append(msgspec.msgpack.encode(Started(request_ids))),
        )

    def add(self, request: EngineRequest) -> None:
        self.send(Add(wire_request(request)))

    def send(self, command: Command) -> None:
        with self._condition:
            if self.alive:
                self._commands.append(msgspec.msgpack.encode(command))
                self._condition.notify()

    def receive(self) -> Frame | Started | None:
        """Word of what begins comes before the frame, and also when there is no frame because of a crash."""
        if self._turned is None:
            self._turned = self._turn()
        if self._announced:
            started = self._decode_frame(self._announced.pop(0))
            assert isinstance(started, Started)
            return started
        frame, self._turned = self._turned, None
        if frame is not None and self.crash(frame):
            with self._condition:
                self.alive = False
                self._commands.clear()
            raise EngineLostError("the engine crashed in a test")
        return frame

    def _turn(self) -> Frame | None:
        with self._condition:
            while not (self._commands or self._woken or self.service.has_work()):
                self._condition.wait()
            self._woken = False
            commands, self._commands = self._commands, []
        for command in commands:
            message = self._decode(command)
            self.service.apply(message)  # type: ignore[arg-type]
        if not self.service.has_work():
            return None
        frame = self._decode_frame(msgspec.msgpack.encode(self.service.turn()))
        assert isinstance(frame, Frame)
        return frame

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    stop = wake

    def restart(self) -> EngineInfo:
        if self.failing_starts:
            self.failing_starts -= 1
            raise EngineDeadError("it does not start in a test")
        self.starts += 1
        self.loaded = self._load()
        self.service = self._service()
        with self._condition:
            self._commands.clear()
            self.alive = True
        return self.info

    @property
    def info(self) -> EngineInfo:
        return engine_info(self.loaded)

    def close(self) -> None:
        self.alive = False
