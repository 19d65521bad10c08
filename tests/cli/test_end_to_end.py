"""The command as users run it: a process of its own, the real model, a real terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "octavo.cli.main"]
DEADLINE = 60


def octavo(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def test_run_answers_and_repeats_itself(smollm2_path: Path) -> None:
    first = octavo("run", "-m", str(smollm2_path), "-n", "24", "Why is the sky blue?")
    assert first.returncode == 0, first.stderr
    assert "sky" in first.stdout or "light" in first.stdout
    assert first.stderr == ""
    assert octavo("run", "-m", str(smollm2_path), "-n", "24", "-t", "1", "Why is the sky blue?").stdout == first.stdout


def test_chat_answers_piped_lines_one_after_the_other(smollm2_path: Path) -> None:
    done = octavo("chat", "-m", str(smollm2_path), "-n", "8", "--stats", stdin="My name is Ada.\nWho am I?\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" out") == 2
    assert "cached" in done.stderr


def test_bench_measures_the_real_engine(smollm2_path: Path) -> None:
    options = "--num-prompts 3 --input-len 20 --output-len 4 --rounds 1 --profile"
    done = octavo("bench", "throughput", "-m", str(smollm2_path), *options.split())
    assert done.returncode == 0, done.stderr
    assert "total_tok_s" in done.stdout
    assert "attention" in done.stderr


class Terminal:
    """A chat running at a terminal that the test types into."""

    def __init__(self, arguments: list[str], state: Path) -> None:
        self._master, slave = pty.openpty()
        environment = dict(os.environ, XDG_STATE_HOME=str(state), TERM="dumb")
        # Ctrl-C reaches a process only when the terminal is its own, which it has to ask for itself.
        start = (
            "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
            "from octavo.cli.main import main; sys.exit(main())"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def type(self, keys: str) -> None:
        self.seen = ""
        os.write(self._master, keys.encode())

    def press(self, key: str, pattern: str) -> None:
        """Press a key, again every few seconds, until the pattern shows."""
        deadline = time.monotonic() + DEADLINE
        while True:
            self.type(key)
            try:
                return self.wait_for(pattern, 3)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise

    def leave(self, key: str) -> int:
        """Press a key, again every few seconds, until the program ends; its exit code."""
        for _ in range(DEADLINE // 3):
            self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(3)
        raise AssertionError(f"{key!r} does not end the program: {self.seen!r}")

    def wait_for(self, pattern: str, seconds: float = DEADLINE) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline, f"{pattern!r} not in {self.seen!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                self.seen += os.read(self._master, 65536).decode(errors="replace")

    def close(self) -> None:
        os.close(self._master)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(smollm2_path: Path, tmp_path: Path) -> None:
    terminal = Terminal(["chat", "-m", str(smollm2_path), "--temperature", "0"], tmp_path)
    try:
        terminal.wait_for("> ")
        terminal.type("Tell me a very long story about a whale and the sea.\n")
        terminal.wait_for(r"sea\.\r\n\S+ \S+ \S+")
        terminal.type("\x03")
        terminal.wait_for(r"\[stopped\]\r\n\r\n> ")
        # Between printing its prompt and listening, readline may miss a key: a person would press it again.
        terminal.press("\x03", "/exit leaves")
        terminal.type("/history\n")
        terminal.wait_for("assistant: ")
        assert terminal.leave("\x04") == 0
        assert "whale" in (tmp_path / "octavo/chat_history").read_text()
    finally:
        terminal.close()
