"""The sampling rules in plain numpy and double precision, clear but slow: the native sampler is tested against them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.sampling.params import SamplingParams

__all__ = [
    "ReferenceRow",
    "apply_penalties",
    "banned_by_words",
    "descending",
    "distribution",
    "draw",
    "green_list",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "keep_typical_p",
    "log_softmax",
    "philox4x32",
    "process_logits",
    "rank",
    "reference_row",
    "uniform",
]

Doubles = NDArray[np.float64]


def log_softmax(logits: ArrayLike) -> Doubles:
    """Log-probabilities of logits."""
    x = np.asarray(logits, np.float64)
    shifted = x - x.max()
    result: Doubles = shifted - np.log(np.exp(shifted).sum())
    return result


def descending(values: ArrayLike) -> NDArray[np.intp]:
    """Ids by descending value, ties by ascending id: the one order of tokens there is."""
    return np.argsort(-np.asarray(values, np.float64), kind="stable")


def rank(logits: ArrayLike, token: int) -> int:
    """The token's place in that order, from 1."""
    return int(np.flatnonzero(descending(logits) == token)[0]) + 1


def green_list(previous: int, vocab_size: int, gamma: float) -> NDArray[np.int64]:
    """The watermark's tokens after ``previous``: the beginning of a shuffle by mt19937, as torch shuffles on a CPU."""
    numbers = np.random.RandomState(15485863 * previous & 0xFFFFFFFF).randint(0, 1 << 32, vocab_size, np.uint32)
    order = np.arange(vocab_size)
    for i in range(vocab_size - 1):
        other = i + int(numbers[i]) % (vocab_size - i)
        order[i], order[other] = order[other], order[i]
    return order[: int(vocab_size * gamma)]


def banned_by_words(words: Iterable[Sequence[int]], output_ids: Sequence[int]) -> set[int]:
    """The tokens that would complete one of the words (token id sequences) after this output."""
    output = list(output_ids)
    banned = set()
    for word in words:
        head = list(word[:-1])
        if len(head) <= len(output) and output[len(output) - len(head) :] == head:
            banned.add(word[-1])
    return banned


def apply_penalties(
    logits: Doubles,
    prompt_ids: Iterable[int],
    output_ids: Iterable[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Doubles:
    """Repetition penalty over prompt and output, then frequency and presence penalties over the output."""
    x = logits.copy()
    counts = np.bincount(np.fromiter(output_ids, np.int64), minlength=x.size)
    seen = counts > 0
    seen[list(prompt_ids)] = True
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    x -= frequency * counts
    x -= presence * (counts > 0)
    return x


def process_logits(
    logits: ArrayLike,
    params: SamplingParams,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    eos_ids: Sequence[int] = (),
) -> Doubles:
    """Everything done to logits before the temperature: watermark, allowed ids, biases, bans, penalties."""
    x = np.asarray(logits, np.float64).copy()
    known = [*prompt_ids, *output_ids]
    if params.watermark and known:
        x[green_list(known[-1], x.size, params.watermark_gamma)] += params.watermark_delta
    if params.allowed_token_ids:
        allowed = np.zeros(x.size, bool)
        allowed[list(params.allowed_token_ids)] = True
        x[~allowed] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in banned_by_words(params.bad_words_ids or (), output_ids):
        x[token] = -np.inf
    if len(output_ids) < params.min_tokens:
        x[[*eos_ids, *(params.stop_token_ids or ())]] = -np.inf
    return apply_penalties(
        x,
        prompt_ids,
        output_ids,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
    )


def keep_min_p(p: Doubles, min_p: float) -> Doubles:
    """Drop tokens less than ``min_p`` times as probable as the most probable one."""
    return np.where(p >= min_p * p.max(), p, 0.0)


def keep_top_k(p: Doubles, logits: Doubles, k: int) -> Doubles:
    """Keep exactly the first k tokens (0: all)."""
    if k <= 0 or k >= p.size:
        return p
    kept = np.zeros_like(p)
    first = descending(logits)[:k]
    kept[first] = p[first]
    return kept


def keep_top_p(p: Doubles, top_p: float) -> Doubles:
    """Keep tokens before which, in descending order, less than ``top_p`` of the mass lies."""
    if top_p >= 1.0:
        return p
    order = descending(p)
    mass = p[order]
    before = np.cumsum(mass) - mass
    kept = np.zeros_like(p)
    first = order[before < top_p * p.sum()]
    kept[first] = p[first]
    return kept


def keep_typical_p(p: Doubles, share: float) -> Doubles:
    """Keep the tokens whose information is nearest to the entropy until they reach ``share``, ties included."""
    if share >= 1.0:
        return p
    q = p / p.sum()
    alive = q > 0
    information = np.full_like(q, np.inf)
    information[alive] = -np.log(q[alive])
    entropy = float((q[alive] * information[alive]).sum())
    distance = np.abs(information - entropy)
    order = np.argsort(distance, kind="stable")
    reached = np.cumsum(q[order]) >= share
    last = order[int(np.argmax(reached))] if reached.any() else order[-1]
    return np.where(distance <= distance[last], p, 0.0)


def distribution(
    logits: ArrayLike,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    typical_p: float = 1.0,
) -> Doubles:
    """The probabilities tokens are drawn with: temperature, min_p, top_k, top_p, typical_p, in this order."""
    x = np.asarray(logits, np.float64)
    p = np.exp((x - x.max()) / temperature)
    p = keep_min_p(p, min_p)
    p = keep_top_k(p, x, top_k)
    p = keep_top_p(p, top_p)
    p = keep_typical_p(p, typical_p)
    result: Doubles = p / p.sum()
    return result


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The number in [0, 1) that decides the token at ``position``."""
    mask = 0xFFFFFFFF
    seed &= (1 << 64) - 1
    words = philox4x32((position & mask, position >> 32, sample_index, 0), (seed & mask, seed >> 32))
    return float((words[1] << 32 | words[0]) >> 11) * 2.0**-53


def draw(p: Doubles, u: float) -> int:
    """The first token whose cumulative share, in order of id, exceeds ``u``."""
    cumulative = np.cumsum(p)
    beyond = np.flatnonzero((cumulative > u * cumulative[-1]) & (p > 0))
    return int(beyond[0]) if beyond.size else int(np.flatnonzero(p)[-1])


@dataclass(frozen=True)
class ReferenceRow:
    """What a row should come to: the token, the distribution it was drawn from, and the reported log-probabilities."""

    token: int
    probabilities: Doubles
    logprobs: Doubles

    @property
    def logprob(self) -> float:
        """The log-probability of the chosen token."""
        return float(self.logprobs[self.token])

    @property
    def rank(self) -> int:
        """The rank of the chosen token by log-probability."""
        return rank(self.logprobs, self.token)

    def top(self, k: int) -> list[int]:
        """The k most probable tokens, without those of probability 0."""
        return [int(token) for token in descending(self.logprobs)[:k] if self.logprobs[token] > -np.inf]


def reference_row(
    logits: ArrayLike,
    params: SamplingParams,
    seed: int,
    sample_index: int = 0,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    eos_ids: Sequence[int] = (),
) -> ReferenceRow:
    """Sample the next token of a sequence by the reference rules."""
    x = process_logits(logits, params, prompt_ids, output_ids, eos_ids)
    if params.greedy:
        token = int(descending(x)[0])
        p = np.zeros_like(x)
        p[token] = 1.0
    else:
        p = distribution(
            x,
            temperature=params.temperature,
            min_p=params.min_p,
            top_k=params.top_k,
            top_p=params.top_p,
            typical_p=params.typical_p,
        )
        token = draw(p, uniform(seed, sample_index, len(prompt_ids) + len(output_ids)))
    if params.logprobs_mode == "raw":
        return ReferenceRow(token, p, log_softmax(logits))
    if params.greedy:
        return ReferenceRow(token, p, log_softmax(x))
    logprobs = np.full_like(p, -np.inf)
    logprobs[p > 0] = np.log(p[p > 0])
    return ReferenceRow(token, p, logprobs)
