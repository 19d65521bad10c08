"""The live view of a run on a terminal: requests, tokens a second, what is in flight. Quiet where none is."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from octavo.benchmarking.load import Counts

__all__ = ["showing"]

# Drawing takes some milliseconds, during which nothing is received: seldom enough not to show in the figures.
_SECONDS = 0.5


@asynccontextmanager
async def showing(counts: Counts, title: str, *, wanted: bool = True) -> AsyncIterator[None]:
    """Show how far ``counts`` is while the block runs, when standard error is a terminal and it is ``wanted``."""
    if not wanted or not sys.stderr.isatty():
        yield
        return
    task = asyncio.create_task(_show(counts, title))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _show(counts: Counts, title: str) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    view = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
    task = view.add_task(title, total=None, state="")
    events, then = counts.events, time.perf_counter()
    with view:
        while True:
            await asyncio.sleep(_SECONDS)
            now = time.perf_counter()
            rate = (counts.events - events) / (now - then)
            events, then = counts.events, now
            failed = f", {counts.failed} failed" if counts.failed else ""
            state = f"{counts.running} in flight, {rate:,.0f} events/s{failed}"
            view.update(task, total=counts.total, completed=counts.done, state=state)
            view.refresh()
