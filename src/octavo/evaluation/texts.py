"""The texts that models are measured and calibrated with: files, or the two that come with octavo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ConfigError

__all__ = ["BUILTIN", "Text", "beginning", "read_text"]

BUILTIN = "builtin"
Purpose = Literal["calibration", "evaluation"]
# A text is tokenised as a whole; at this size that takes some minutes and gigabytes.
MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """A text and the name records call it by."""

    name: str
    content: str


def read_text(source: str, purpose: Purpose = "evaluation") -> Text:
    """The file ``source``, UTF-8, or for "builtin" the text for that purpose.

    Raises ConfigError for a file that is missing, empty, too large or not text.
    """
    if source == BUILTIN:
        path = Path(__file__).parent / "builtin_texts" / f"{purpose}.txt"
        return Text(f"{BUILTIN} {purpose}", path.read_text(encoding="utf-8"))
    path = Path(source)
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{path}: is {size} bytes long, texts may have {MOST_BYTES}")
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; {BUILTIN!r} is the text that comes with octavo"
        ) from error
    if not content.strip():
        raise ConfigError(f"{path}: holds no text")
    return Text(path.name, content)


def beginning(encode: Callable[[str], list[int]]) -> list[int]:
    """The tokens that ``encode`` (a tokenizer with special tokens) puts in front of every text: mostly none or one."""
    first, second = encode("a"), encode("b")
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    return first[:shared]
