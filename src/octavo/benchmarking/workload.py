"""Prompts for measurements: random words, the same on every machine, never the same twice in one run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

__all__ = ["TextDecoder", "TextEncoder", "WordSource", "random_prompts", "single_token_words"]

_WORDS = (
    "river", "stone", "garden", "window", "letter", "morning", "engine", "market", "silver", "yellow", "doctor",
    "winter", "planet", "forest", "number", "music", "bridge", "camera", "dinner", "empty", "father", "gentle",
    "harbor", "island", "jacket", "kitchen", "ladder", "mirror", "needle", "orange", "pencil", "quiet", "rabbit",
    "school", "ticket", "under", "valley", "wagon", "young", "zebra", "answer", "before", "circle", "danger", "early",
    "flower", "golden", "hammer", "inside", "journey", "king", "lemon", "middle", "nature", "ocean", "people",
    "question", "road", "summer", "table", "uncle", "village", "water", "year", "above", "bottle", "cloud", "dream",
    "evening", "finger", "glass", "horse", "idea", "joke", "knife", "light", "mountain", "night", "open", "paper",
    "queen", "rain", "sister", "train",
)  # fmt: skip
_ENOUGH_WORDS = 16  # below this, prompts of one-token words would be too much alike


class TextEncoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class TextDecoder(TextEncoder, Protocol):
    """A tokenizer that also goes back from ids to text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def random_prompts(tokenizer: TextEncoder, count: int, length: int, *, seed: int) -> list[list[int]]:
    """``count`` prompts of exactly ``length`` tokens; equal arguments give equal prompts, other seeds others."""
    return [_prompt(tokenizer, length, random.Random(f"{seed}/{index}")) for index in range(count)]


def _prompt(tokenizer: TextEncoder, length: int, numbers: random.Random) -> list[int]:
    # A word is at least one token, so this many words are enough, and the surplus is cut off.
    text = " ".join(numbers.choice(_WORDS) for _ in range(length))
    return list(tokenizer.encode(text, add_special_tokens=False))[:length]


def single_token_words(tokenizer: TextEncoder) -> list[str]:
    """Those of octavo's words that are one token each, both at the start of a text and after a space."""
    return [
        word
        for word in _WORDS
        if all(len(tokenizer.encode(form, add_special_tokens=False)) == 1 for form in (word, " " + word))
    ]


class WordSource:
    """Makes texts of a given number of tokens out of random words.

    Where the tokenizer knows enough words as one token each, a text of n words is n tokens, exactly. Elsewhere words
    are added until the next would be too much, and ``length`` tells what a text came to.
    """

    def __init__(self, tokenizer: TextEncoder) -> None:
        self.tokenizer = tokenizer
        words = single_token_words(tokenizer)
        self.exact = len(words) >= _ENOUGH_WORDS
        self._words = words if self.exact else list(_WORDS)

    def words(self, tokens: int, numbers: random.Random) -> list[str]:
        """Words that are ``tokens`` tokens together, joined by spaces (at most so many where it cannot be exact)."""
        if self.exact:
            return numbers.choices(self._words, k=tokens)
        found: list[str] = []
        length = 0
        while length < tokens:
            word = numbers.choice(self._words)
            length += len(self.tokenizer.encode(" " + word, add_special_tokens=False))
            if length <= tokens or not found:
                found.append(word)
        return found

    def length(self, text: str) -> int:
        """Tokens of a text, without those a server may put before it."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))
