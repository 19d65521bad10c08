"""Finds the watermark of a text: counts the tokens it preferred and says how unlikely that many are by chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo import _native
from octavo.errors import ParameterError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from octavo.sampling.params import WordEncoder

__all__ = ["FLAG_ABOVE", "WatermarkScore", "detect", "green_list"]

FLAG_ABOVE = 4.0  # standard deviations; 1 in 30,000 texts without a watermark is above


@dataclass(frozen=True, slots=True)
class WatermarkScore:
    """How much of a text is green.

    ``num_tokens`` counts the tokens that were looked at and ``green`` those of them that a watermark prefers. ``z`` is
    the distance of ``green`` from what chance gives, in standard deviations, and ``p_value`` the probability that
    chance gives at least as much. ``flagged``: whether ``z`` is above the threshold.
    """

    num_tokens: int
    green: int
    z: float
    p_value: float
    flagged: bool


def green_list(previous: int, vocab_size: int, gamma: float = 0.5) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The ids a watermark prefers after the token ``previous``: ``int(vocab_size * gamma)`` of them, in random order.

    ``vocab_size`` is the number of the model's logits. `ParameterError` when an argument is out of range.
    """
    count = _green_count(vocab_size, gamma)
    if not 0 <= previous < vocab_size:
        raise ParameterError("previous", previous, f"a token id (0 to {vocab_size - 1})")
    ids = np.empty(count, np.int32)
    _native.green_list(previous, vocab_size, ids)
    return ids


def detect(
    text: str | Iterable[int],
    *,
    tokenizer: WordEncoder | None = None,
    vocab_size: int | None = None,
    gamma: float = 0.5,
    ignore_repeated_bigrams: bool = True,
    threshold: float = FLAG_ABOVE,
) -> WatermarkScore:
    """Test a text, or its token ids, for a watermark.

    Needed are what the text was made with: the model's tokenizer (for a string), the number of its logits
    (``vocab_size``, default the tokenizer's) and ``watermark_gamma``; not ``watermark_delta`` and not the prompt. Each
    token but the first is looked at, given the one before it; with ``ignore_repeated_bigrams`` a pair of tokens counts
    once, since text that repeats itself would otherwise count the same evidence again.

    The number of green tokens among T has, without a watermark, mean ``gamma * T`` and variance
    ``gamma * (1 - gamma) * T``. A text that had little choice, such as the greedy answer to a question with one
    answer, carries little watermark and may stay below the threshold; below about 50 tokens few texts reach it.
    """
    if isinstance(text, str):
        if tokenizer is None:
            raise ParameterError("tokenizer", None, "the model's tokenizer when the text is a string")
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = [int(token) for token in text]
    if vocab_size is None:
        vocab_size = getattr(tokenizer, "vocab_size", None)
        if vocab_size is None:
            raise ParameterError("vocab_size", None, "the number of the model's logits, or a tokenizer must be given")
    if not threshold > 0.0:
        raise ParameterError("threshold", threshold, "a number above 0")
    _green_count(vocab_size, gamma)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ParameterError("text", token, f"token ids of the vocabulary (0 to {vocab_size - 1})")

    pairs = list(itertools.pairwise(ids))
    if ignore_repeated_bigrams:
        pairs = list(dict.fromkeys(pairs))
    following: dict[int, list[int]] = {}
    for previous, token in pairs:
        following.setdefault(previous, []).append(token)
    is_green = np.empty(vocab_size, bool)
    green = 0
    for previous, tokens in following.items():
        is_green[:] = False
        is_green[green_list(previous, vocab_size, gamma)] = True
        green += int(is_green[tokens].sum())

    total = len(pairs)
    z = (green - gamma * total) / math.sqrt(total * gamma * (1.0 - gamma)) if total else 0.0
    return WatermarkScore(total, green, z, 0.5 * math.erfc(z / math.sqrt(2.0)) if total else 1.0, z > threshold)


def _green_count(vocab_size: int, gamma: float) -> int:
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or not 1 <= vocab_size <= 1 << 27:
        raise ParameterError("vocab_size", vocab_size, f"an integer from 1 to {1 << 27}")
    if not isinstance(gamma, (int, float)) or isinstance(gamma, bool) or not 0.0 < gamma < 1.0:
        raise ParameterError("gamma", gamma, "a number above 0 and below 1")
    return int(vocab_size * gamma)
