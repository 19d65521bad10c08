"""``octavo serve`` as users run it: a process of its own with an engine process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

__all__ = ["Served"]

SMALL = ("--max-model-len", "2048", "--num-gpu-blocks-override", "512", "--max-num-seqs", "8")


class Served:
    """``octavo serve`` in a process of its own, with what it prints."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *SMALL, *arguments]
        variables = {**os.environ, **(environment or {})}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._listening = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors)),
        ]
        for reader in self._readers:
            reader.start()
        self._listening.wait(60)
        found = re.search(r" at (\S+)$", self.lines[-1]) if self.lines else None
        if found is None:
            self.close()
            pytest.fail(f"it does not serve: {self.errors}")
        self.url = found.group(1)

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if " serves " in line:
                self._listening.set()
        self._listening.set()

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self, *signals: int) -> int:
        """Send signals, wait for the end and give the exit code; no process is left over."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)  # one after the other, or the kernel may deliver them in another order
        code = self.process.wait(60)
        for reader in self._readers:
            reader.join(10)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader, stream in zip(self._readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(10)
            assert stream is not None
            stream.close()
