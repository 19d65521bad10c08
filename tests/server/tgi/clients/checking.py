"""Runs the checks of a client script: each function check_*, one line of JSON for each, a traceback where it failed.

Needs nothing but the standard library, for it runs in the environments of the clients.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["raises", "run"]


def run(namespace: dict[str, Any], url: str) -> None:
    """Run every check of a script with the address of the server."""
    for name, check in namespace.items():
        if not name.startswith("check_"):
            continue
        failure = None
        try:
            result = check(url)
            if inspect.isawaitable(result):
                asyncio.run(_finish(result))
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps({"check": name, "failure": failure}), flush=True)


async def _finish(work: Any) -> None:
    await work


def raises(kind: type[Exception], work: Callable[[], Any]) -> str:
    """The text of the exception of that kind which ``work`` has to raise."""
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")
