"""Prompts for measurements: random words, the same on every machine, never the same twice in one run."""

from __future__ import annotations

import random
from typing import Protocol

__all__ = ["TextEncoder", "random_prompts"]

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


class TextEncoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def random_prompts(tokenizer: TextEncoder, count: int, length: int, *, seed: int) -> list[list[int]]:
    """``count`` prompts of exactly ``length`` tokens; equal arguments give equal prompts, other seeds others."""
    return [_prompt(tokenizer, length, random.Random(f"{seed}/{index}")) for index in range(count)]


def _prompt(tokenizer: TextEncoder, length: int, numbers: random.Random) -> list[int]:
    # A word is at least one token, so this many words are enough, and the surplus is cut off.
    text = " ".join(numbers.choice(_WORDS) for _ in range(length))
    return list(tokenizer.encode(text, add_special_tokens=False))[:length]
