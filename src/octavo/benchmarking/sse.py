"""Cuts server-sent events out of the pieces of a body, each with the time its last byte came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["events"]


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Time and data of each event that has data; comments and other fields are left out.

    Lines may end with LF or CR LF. An event that the body's end cuts off is given all the same: some servers leave out
    the last empty line.
    """
    pending = b""
    last = 0.0
    for time, piece in pieces:
        last = time
        pending += piece
        if b"\r" in pending:
            pending = pending.replace(b"\r\n", b"\n")
        if b"\n\n" not in pending:
            continue
        *whole, pending = pending.split(b"\n\n")
        for event in whole:
            data = _data(event)
            if data is not None:
                yield time, data
    data = _data(pending)
    if data is not None:
        yield last, data


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data:") and b"\n" not in event:
        return event[5:].strip()
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
