"""A headless Chromium for tests, driven through the Chrome DevTools Protocol: pages, keys, screenshots, its console."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")

_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}
_SHIFT = 8


def find_browser() -> str | None:
    """The Chromium of this machine, None when there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class BrowserError(AssertionError):
    """Something did not happen in the page, or its script failed."""


class Browser:
    """One browser with one page. What goes wrong in the page is collected in ``problems``."""

    def __init__(self, program: str, profile: Path) -> None:
        self.problems: list[str] = []
        self._count = 0
        self._stack = ExitStack()
        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",  # tests may run as root, where Chromium has no sandbox
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-extensions",
                "--hide-scrollbars",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._socket = self._connect(profile / "DevToolsActivePort")
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _connect(self, port_file: Path) -> ClientConnection:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BrowserError(f"the browser ended with exit code {self._process.returncode}")
            lines = port_file.read_text().split() if port_file.exists() else []
            if lines:
                with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=30) as answer:
                    pages = [target for target in json.load(answer) if target["type"] == "page"]
                if pages:
                    url = pages[0]["webSocketDebuggerUrl"]
                    connection = connect(
                        url, max_size=None, max_queue=None, ping_interval=None, compression=None, proxy=None
                    )
                    return self._stack.enter_context(connection)
            time.sleep(0.05)
        raise BrowserError("the browser did not start within a minute")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.send("Browser.close")
            self._stack.close()
            self._process.wait(timeout=20)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    # -- the protocol

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and give its result."""
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._count:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what a developer would see in red."""
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(value.get("value", value)) for value in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    # -- the page

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete."""
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, awaited when it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"].get("exception", answer["exceptionDetails"])))
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise BrowserError(f"not within {seconds:g} s: {condition}")
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """Click in the middle of an element with the mouse."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'nearest'}})")
        box = self.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({found}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Enter text where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code, text = _KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": _SHIFT if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.focus(); e.select(); return 1; })()"
        )
        if text:
            self.type(text)
        else:
            self.evaluate("document.execCommand('delete')")
        self.evaluate("document.activeElement.dispatchEvent(new Event('change', {bubbles: true}))")

    def show_as(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """The size of the window and the colour scheme of the system."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
