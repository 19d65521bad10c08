"""Cutting texts into windows of tokens, and which of a window's positions count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError

__all__ = ["Window", "alternating_windows", "text_windows"]


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one text, as a model is given them.

    ``seen`` is how many of its first tokens were in the window before: their positions are context, not measured again.
    """

    text: str
    start: int
    ids: list[int]
    seen: int = 0


def text_windows(
    name: str,
    ids: Sequence[int],
    length: int,
    *,
    stride: int | None = None,
    most: int | None = None,
    prefix: Sequence[int] = (),
) -> Iterator[Window]:
    """Windows of ``length`` tokens, each beginning ``stride`` (default: ``length``) after the one before; the last may
    be shorter. At the most ``most``; each has ``prefix`` (a beginning-of-text token) in front, which counts as seen."""
    room = length - len(prefix)
    step = room if stride is None else stride
    if room < 2 or not 0 < step <= room:
        raise ConfigError(
            f"windows of {length} tokens and a stride of {stride}: need 2 or more tokens and a stride of them"
        )
    start = number = end = 0
    while end < len(ids) and (most is None or number < most):
        end = min(start + room, len(ids))
        if end - start < 2:
            break
        overlap = room - step if number else 0
        yield Window(name, start, [*prefix, *ids[start:end]], overlap + len(prefix) if overlap else 0)
        start, number = start + step, number + 1


def alternating_windows(texts: Sequence[tuple[str, Sequence[int]]], count: int, length: int) -> list[Window]:
    """``count`` windows of ``length`` tokens, from each text in turn; the first ``length`` tokens of a text are left
    out: what files begin with is much alike."""
    windows: list[Window] = []
    start = length
    while len(windows) < count:
        long_enough = [(name, ids) for name, ids in texts if len(ids) >= start + length]
        if not long_enough:
            raise ConfigError(
                f"the {len(texts)} texts give {len(windows)} windows of {length} tokens, {count} were asked for"
            )
        windows += [Window(name, start, list(ids[start : start + length])) for name, ids in long_enough]
        start += length
    return windows[:count]
