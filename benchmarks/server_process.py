"""Starts a server as a process of its own, waits until it answers, and tells what it and its children use."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from http_client import Address

__all__ = ["OCTAVO", "ServerProcess", "anonymous_bytes", "cpu_seconds", "free_port"]

OCTAVO = (sys.executable, "-m", "octavo.cli.main")
_START_SECONDS = 500.0
_STOP_SECONDS = 60.0


def free_port() -> int:
    """A port of the loopback device that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A running server. ``command`` may hold {port}; leaving the block stops it and whatever it started."""

    def __init__(
        self, command: Sequence[str], *, model: str = "m", environment: Mapping[str, str] | None = None
    ) -> None:
        self.address = Address("127.0.0.1", free_port())
        self.model = model
        self.command = [word.replace("{port}", str(self.address.port)) for word in command]
        self.environment = dict(environment or {})
        self.start_seconds = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-bench-")
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def octavo(cls, *options: str, model: str = "smollm2-135m", name: str = "m") -> Self:
        """``octavo serve`` with these options, the model under the name ``name``."""
        words = [*OCTAVO, "serve", model, "--host", "127.0.0.1", "--port", "{port}", "--served-model-name", name]
        return cls([*words, *options], model=name)

    def __enter__(self) -> Self:
        began = time.monotonic()
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() - began > _START_SECONDS:
                    raise SystemExit(f"the server did not start ({self._process.poll()}):\n{self.log()[-3000:]}")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        """Whether it answers a request for one token: being up is more than having opened the port."""
        body = json.dumps({"model": self.model, "prompt": "Hello", "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"{self.address.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            if error.code < 500:
                self.stop()
                raise SystemExit(f"the server refuses the first request: {error.read()[:500]!r}") from error
            return False
        except (OSError, ValueError):
            return False
        return True

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tree(self) -> list[psutil.Process]:
        """The server's process and its descendants, the server's first."""
        try:
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.Error:
            return []

    def engine(self) -> psutil.Process | None:
        """The descendant that holds the most memory: the engine process. None while there is none."""
        sizes = {}
        for process in self.tree()[1:]:
            with contextlib.suppress(psutil.Error):
                sizes[process] = process.memory_info().rss
        return max(sizes, key=lambda process: sizes[process], default=None)

    def rss_bytes(self) -> int:
        """Resident bytes of the whole tree; pages that processes share count once for each."""
        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def log(self) -> str:
        """What it has printed."""
        return self._log_file.read_text(errors="replace")

    @property
    def _log_file(self) -> Path:
        return Path(self._folder.name) / "log"

    def stop(self) -> int | None:
        """SIGTERM, after a minute SIGKILL; the exit status."""
        if self._process is None:
            return None
        children = self.tree()[1:]
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._folder.cleanup()
        return self._process.returncode


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Processor seconds these have used so far, in user and system mode."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def anonymous_bytes(pid: int) -> int | None:
    """Resident memory a process has of its own, mapped files left out; None when it is gone (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None
