"""What commands print beside their answers: download progress, tables and remarks, all on stderr unless asked for."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.planning.units import format_bytes

__all__ = ["Progress", "WorkProgress", "download_progress", "remark", "settled", "table", "work_progress"]

Progress = Callable[[str, int, int | None], None]
"""Told about a download: what is fetched, bytes so far, bytes in all where known."""


WorkProgress = Callable[[int, str], None]
"""Told how many steps of a piece of work are done, and how it stands."""


def remark(text: str) -> None:
    """Print a line about what is going on, apart from the answer on stdout."""
    print(text, file=sys.stderr, flush=True)


def settled() -> None:
    """Turn on garbage collection, off while a command starts; it need not look at what has been made so far."""
    gc.freeze()
    gc.enable()


@contextmanager
def download_progress() -> Iterator[Progress]:
    """A progress report on stderr that appears with the first byte fetched: a bar, or lines where no terminal is."""
    if sys.stderr.isatty():
        with _bar() as report:
            yield report
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[Progress]:
    bar = None
    tasks = {}

    def report(what: str, done: int, total: int | None) -> None:
        nonlocal bar
        if bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            bar = Bar(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
            bar.start()
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


def _lines() -> Progress:
    told: dict[str, int] = {}

    def report(what: str, done: int, total: int | None) -> None:
        # Logs want a few lines, not one per piece: the start, each quarter, the end.
        quarter = 4 * done // total if total else 0
        if told.get(what, -1) >= quarter:
            return
        told[what] = quarter
        of = f" of {format_bytes(total)}" if total else ""
        remark(f"fetching {what}: {format_bytes(done)}{of}")

    return report


@contextmanager
def work_progress(title: str, total: int) -> Iterator[WorkProgress]:
    """Progress of work of ``total`` steps on stderr: a bar with the time that is left, or a line for each tenth."""
    if not sys.stderr.isatty():
        yield _work_lines(title, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Bar(*columns, TextColumn("{task.fields[state]}"), console=Console(stderr=True))
    task = bar.add_task(title, total=total, state="")
    with bar:
        yield lambda done, state: bar.update(task, completed=done, state=state)


def _work_lines(title: str, total: int) -> WorkProgress:
    began, told, first = time.monotonic(), 0, None

    def report(done: int, state: str) -> None:
        nonlocal told, first
        # What was there already when the work began took no time.
        first = done - 1 if first is None else first
        tenth = 10 * done // max(1, total)
        if tenth <= told and done < total:
            return
        told = tenth
        left = (time.monotonic() - began) / max(1, done - first) * (total - done)
        ahead = f", {left:.0f} s left" if done < total else ""
        remark(f"{title}: {done} of {total}{ahead}{'; ' + state if state else ''}")

    return report


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned as plain text: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join((row[0].ljust(len(first)), *others)).rstrip())
    return "\n".join(lines)
