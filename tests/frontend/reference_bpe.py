"""A byte-level BPE tokenizer from scratch, in plain Python without regular expressions: the tests' other opinion."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

__all__ = ["WORDS", "byte_characters", "encode", "merge_word"]

_BLANKS = frozenset(
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f"
    "\u205f\u3000"
)


def _letter(c: str) -> bool:
    return unicodedata.category(c)[0] == "L"


def _number(c: str) -> bool:
    return unicodedata.category(c)[0] == "N"


def _sign(c: str) -> bool:
    return not (_letter(c) or _number(c) or c in _BLANKS)


def _run(text: str, start: int, test: Callable[[str], bool]) -> int:
    while start < len(text) and test(text[start]):
        start += 1
    return start


def _blank_run(text: str, start: int) -> int:
    """The end of white space, of which a last blank before other text is left to that text."""
    end = _run(text, start, lambda c: c in _BLANKS)
    return end - 1 if end < len(text) and end - start > 1 else end


def _gpt2_step(text: str, at: int) -> int:
    if text[at] == "'":
        for ending in ("s", "t", "re", "ve", "m", "ll", "d"):
            if text.startswith(ending, at + 1):
                return at + 1 + len(ending)
    body = at + 1 if text[at] == " " and at + 1 < len(text) else at
    for test in (_letter, _number, _sign):
        if test(text[body]):
            return _run(text, body, test)
    return _blank_run(text, at)


def _modern_step(digits: int) -> Callable[[str, int], int]:
    """The words of Llama 3 (three digits at a time) and Qwen 2 (one digit at a time)."""

    def step(text: str, at: int) -> int:
        c = text[at]
        if c == "'":
            for ending in ("s", "t", "re", "ve", "m", "ll", "d"):
                found = text[at + 1 : at + 1 + len(ending)]
                # The long s is an s to whoever ignores case.
                if found.lower().replace("\u017f", "s") == ending:
                    return at + 1 + len(ending)
        if _letter(c):
            return _run(text, at, _letter)
        if c not in "\r\n" and not _number(c) and at + 1 < len(text) and _letter(text[at + 1]):
            return _run(text, at + 1, _letter)
        if _number(c):
            return min(_run(text, at, _number), at + digits)
        body = at + 1 if c == " " and at + 1 < len(text) else at
        if _sign(text[body]):
            return _run(text, _run(text, body, _sign), lambda d: d in "\r\n")
        end = _run(text, at, lambda d: d in _BLANKS)
        last_line_end = max(text.rfind("\n", at, end), text.rfind("\r", at, end))
        return last_line_end + 1 if last_line_end >= 0 else _blank_run(text, at)

    return step


def _words(step: Callable[[str, int], int]) -> Callable[[str], list[str]]:
    def cut(text: str) -> list[str]:
        words = []
        at = 0
        while at < len(text):
            end = step(text, at)
            words.append(text[at:end])
            at = end
        return words

    return cut


_gpt2 = _words(_gpt2_step)


def _smollm(text: str) -> list[str]:
    words: list[str] = []
    at = 0
    while at < len(text):
        end = at + 1 if _number(text[at]) else _run(text, at, lambda c: not _number(c))
        words += _gpt2(text[at:end])
        at = end
    return words


WORDS: dict[str, Callable[[str], list[str]]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _words(_modern_step(3)),
    "qwen2": lambda text: _words(_modern_step(1))(unicodedata.normalize("NFC", text)),
}


def byte_characters() -> list[str]:
    """The character for each byte value: printable ones for themselves, the others from U+0100 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    characters = []
    spare = 256
    for value in range(256):
        if value in shown:
            characters.append(chr(value))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters


_CHARACTERS = byte_characters()


def merge_word(parts: list[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge the neighbours of lowest rank, leftmost first, until none can be merged."""
    while len(parts) > 1:
        candidates = [(ranks[pair], place) for place, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not candidates:
            break
        _, place = min(candidates)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def encode(
    text: str,
    pre: str,
    vocab: Mapping[str, int],
    ranks: Mapping[tuple[str, str], int],
    whole_words: bool = False,
) -> Sequence[int]:
    """The ids of a text without special tokens; bytes the vocabulary lacks are left out before merging."""
    ids: list[int] = []
    for word in WORDS[pre](text):
        spelled = [_CHARACTERS[value] for value in word.encode()]
        whole = "".join(spelled)
        if whole_words and whole in vocab:
            ids.append(vocab[whole])
        else:
            ids += [vocab[part] for part in merge_word([part for part in spelled if part in vocab], ranks)]
    return ids
