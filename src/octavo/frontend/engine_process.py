"""The engine's process: loads a model and serves the socket it was started with until the other end is closed."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time

from octavo.engine.channel import Channel, ChannelClosedError
from octavo.engine.messages import Failed, Heartbeat, Start, Started, ToEngine
from octavo.engine.service import EngineService
from octavo.errors import OctavoError

__all__ = ["main"]

_OOM_SCORE = 500  # of 1000; an ordinary process has 0
_MOST_BACKLOG = 1 << 24  # bytes of frames the front end has not read; the engine waits for it before it computes more


class _Pulse:
    """Sends a sign of life from a thread of its own, so that a long step is not taken for a hang.

    When the front end is gone the process ends here, also in the middle of a step.
    """

    def __init__(self, channel: Channel[ToEngine], seconds: float) -> None:
        self._channel = channel
        self._seconds = seconds
        self.steps = 0
        self.step_began: float | None = None
        threading.Thread(target=self._run, name="octavo-pulse", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._seconds)
            began = self.step_began
            try:
                self._channel.send(Heartbeat(self.steps, 0.0 if began is None else time.monotonic() - began))
            except ChannelClosedError:
                os._exit(0)


def main(descriptor: int) -> int:
    """Serve one front end over the inherited socket."""
    # The front end decides when its engine ends; a Ctrl-C in the terminal or a service manager's SIGTERM reaches both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _go_first_when_memory_runs_out()
    channel: Channel[ToEngine] = Channel(socket.socket(fileno=descriptor), ToEngine)
    with contextlib.suppress(ChannelClosedError):
        start = channel.receive(None)
        while start is None:
            start = channel.receive(None)
        if not isinstance(start, Start):
            raise RuntimeError(f"the first message was {type(start).__name__}, not Start")
        pulse = _Pulse(channel, start.heartbeat_seconds)
        try:
            _serve(channel, start, pulse)
        except ChannelClosedError:
            raise
        except OctavoError as error:
            channel.send_all(Failed(type(error).__name__, str(error)))
            return 1
        except MemoryError:
            channel.send_all(
                Failed("CapacityError", "out of memory: lower max_model_len, memory_utilization or quantization")
            )
            return 1
        except BaseException as error:
            with contextlib.suppress(ChannelClosedError):
                channel.send_all(Failed("EngineDeadError", f"{type(error).__name__}: {error}"))
            raise
    return 0


def _go_first_when_memory_runs_out() -> None:
    """Have the system kill this process rather than the front end, which can replace it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < _OOM_SCORE:
            file.seek(0)
            file.write(str(_OOM_SCORE))


def _serve(channel: Channel[ToEngine], start: Start, pulse: _Pulse) -> None:
    from octavo.frontend.engine_link import engine_info
    from octavo.frontend.loading import load_engine
    from octavo.frontend.options import EngineOptions

    gc.disable()
    loaded = load_engine(EngineOptions.from_kwargs(**start.options), with_tokenizer=False)
    gc.freeze()  # what is there now stays: the collector need not look at it
    gc.enable()
    channel.send(engine_info(loaded))
    service = EngineService(loaded.engine, lambda request_ids: channel.send(Started(request_ids)))
    phases = loaded.engine.phases
    if phases is not None:
        atexit.register(lambda: print("profile:", json.dumps(loaded.profile_steps()), file=sys.stderr, flush=True))
    while True:
        ready = service.has_work() and channel.backlog < _MOST_BACKLOG
        command = channel.receive(0 if ready else None)
        while command is not None:
            if isinstance(command, Start):
                raise RuntimeError("a second Start message")
            service.apply(command)
            command = channel.receive(0)
        if service.has_work() and channel.backlog < _MOST_BACKLOG:
            pulse.step_began = time.monotonic()
            frame = service.turn()
            pulse.step_began = None
            pulse.steps += 1
            sending = time.perf_counter()
            channel.send(frame)
            if phases is not None and frame.stepped:
                phases.add("framing", time.perf_counter() - sending)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
