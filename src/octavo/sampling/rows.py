"""Sampling rows: the sampling state of one sequence, and writing it into the native sampler's records for a step.

A record is 128 bytes (``SampleRecord`` in native/sampler.h). Most of it never changes during a sequence's life, so it
is packed once; a step copies it and writes the position. Lists (biases, bans, penalties) go into one pool, those of one
row after those of another.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.backends.interface import SampledToken
from octavo.errors import ParameterError
from octavo.sampling.params import SamplingParams

__all__ = ["NativeSampler", "RowSampling", "SamplerBatch"]

RECORD_BYTES = 128
_RECORD = struct.Struct("<Qq Ii ffff i fff iii iiiii iifi 24x")
_WORDS = RECORD_BYTES // 4
_QUADS = RECORD_BYTES // 8
# Offsets in a record: of the position in 8-byte words, of the others in 4-byte words.
_POSITION = 1
_TOP_START = 16
_LIST_START = 17
_PREVIOUS = 22
_IDLE, _GREEDY, _RANDOM, _PROMPT = range(4)

ERRORS = {
    1: "the model produced logits that are not finite numbers",
    2: "no token may be generated: bans and allowed_token_ids leave none",
    3: "the sampler refused its parameters",
}

_KEPT_TOP_ENTRIES = 1 << 20

Ints = NDArray[np.int32]
_NO_INTS: Ints = np.empty(0, np.int32)


class NativeSampler(Protocol):
    """What is used of ``octavo._native.Sampler``; the arrays are views of its memory."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_top(self) -> int: ...
    @property
    def records(self) -> NDArray[np.uint8]: ...
    @property
    def tokens(self) -> Ints: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def ranks(self) -> Ints: ...
    @property
    def statuses(self) -> Ints: ...
    def set_pools(self, lists: Ints, top_ids: Ints, top_logprobs: NDArray[np.float32]) -> None: ...


class RowSampling:
    """The sampling state of one sequence: its parameters, packed, and what its output so far does to the next token.

    ``seed`` and ``sample_index`` (0 to n - 1) key the random numbers, together with a token's position. ``append`` is
    called once for each token that joins the output; a sequence computed again after a preemption keeps its state,
    since its tokens are still its output. ``reset`` makes the state of any given output from scratch.
    """

    __slots__ = (
        "_allowed",
        "_banned",
        "_banned_early",
        "_before_output",
        "_bias",
        "_counts",
        "_heads",
        "_num_penalised",
        "_output",
        "_penalised",
        "_prompt_ids",
        "_record_fields",
        "_repetition",
        "_slots",
        "_tracks_counts",
        "_tracks_output",
        "_watermark_fields",
        "has_lists",
        "num_output",
        "num_prompt_top",
        "num_top",
        "params",
        "previous",
        "processed",
        "record",
        "sample_index",
        "seed",
        "vocab_size",
        "watermark",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        sample_index: int = 0,
        prompt_ids: Sequence[int] | Ints = (),
        eos_ids: Iterable[int] = (),
        *,
        vocab_size: int,
        output_ids: Iterable[int] = (),
    ) -> None:
        params.check_ids(vocab_size)
        if params.bad_words and params.bad_words_ids is None:
            raise ParameterError("bad_words", params.bad_words, "tokenised first: call with_bad_words_ids(tokenizer)")
        self.params = params
        self.vocab_size = vocab_size
        self.seed = seed & ((1 << 64) - 1)
        self.sample_index = sample_index
        self.num_top = params.num_logprobs(vocab_size)
        self.num_prompt_top = params.num_prompt_logprobs(vocab_size)

        self._bias = _NO_INTS
        if params.logit_bias:
            values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
            ids = np.fromiter(params.logit_bias, np.int32, len(params.logit_bias))
            self._bias = np.concatenate([ids, values.view(np.int32)])
        self._allowed = _ints(params.allowed_token_ids or ())
        words = params.bad_words_ids or ()
        always = {word[0] for word in words if len(word) == 1}
        self._banned = _ints(sorted(always))
        # End tokens are banned until min_tokens; those outside the vocabulary cannot come up anyway.
        ends = {token for token in (*eos_ids, *(params.stop_token_ids or ())) if 0 <= token < vocab_size}
        self._banned_early = _ints(sorted(always | ends)) if params.min_tokens > 0 else self._banned
        # Bad words of several tokens by their last token but one: only those that may be complete next are compared.
        self._heads: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._heads.setdefault(word[-2], []).append(word)
        self._tracks_output = bool(self._heads)
        self._repetition = params.repetition_penalty != 1.0
        self._tracks_counts = self._repetition or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._prompt_ids = _NO_INTS
        if self._repetition:
            self._prompt_ids = np.unique(np.asarray(prompt_ids, np.int32))
            if self._prompt_ids.size and not 0 <= self._prompt_ids[0] <= self._prompt_ids[-1] < vocab_size:
                outside = self._prompt_ids[0] if self._prompt_ids[0] < 0 else self._prompt_ids[-1]
                raise ParameterError("prompt_token_ids", int(outside), f"token ids from 0 to {vocab_size - 1}")
        # What the record says but for the lists, which change from step to step where there are any.
        self._record_fields: tuple[Any, ...] = (
            self.seed,
            0,
            sample_index,
            _GREEDY if params.greedy else _RANDOM,
            params.temperature,
            params.top_p,
            params.min_p,
            params.typical_p,
            max(params.top_k, 0),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            -1 if self.num_top is None else self.num_top,
            0,
            0,
        )
        # The watermark follows from the last known token: before any output, the prompt's last one.
        self.watermark = params.watermark
        self.processed = params.logprobs_mode == "processed"
        self._before_output = int(prompt_ids[-1]) if params.watermark and len(prompt_ids) else -1
        if self._before_output >= vocab_size:
            raise ParameterError("prompt_token_ids", self._before_output, f"token ids from 0 to {vocab_size - 1}")
        self._watermark_fields: tuple[Any, ...] = (
            -1,
            int(vocab_size * params.watermark_gamma) if params.watermark else 0,
            params.watermark_delta,
            int(self.processed),
        )
        self.record = _RECORD.pack(*self._record_fields, 0, 0, 0, 0, 0, *self._watermark_fields)
        self.reset(output_ids)

    def reset(self, output_ids: Iterable[int] = ()) -> None:
        """Make the state that follows this output."""
        self.num_output = 0
        self.previous = self._before_output
        self._output: list[int] = []
        self._slots: dict[int, int] = {}
        self._penalised = _NO_INTS
        self._counts = _NO_INTS
        self._num_penalised = 0
        if self._prompt_ids.size:
            size = self._num_penalised = self._prompt_ids.size
            self._penalised = np.zeros(size + 64, np.int32)
            self._counts = np.zeros(size + 64, np.int32)
            self._penalised[:size] = self._prompt_ids
            self._slots = {token: slot for slot, token in enumerate(self._prompt_ids.tolist())}
        self._update_has_lists()
        for token in output_ids:
            self.append(token)

    def _update_has_lists(self) -> None:
        self.has_lists = bool(
            self._bias.size
            or self._allowed.size
            or self._banned.size
            or self._heads
            or self._tracks_counts
            or (self.num_output < self.params.min_tokens and self._banned_early.size)
        )

    def append(self, token: int) -> None:
        """Take note of a token that joined the output."""
        self.num_output += 1
        self.previous = token
        if not self.has_lists:
            return
        if self._tracks_counts:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = self._num_penalised
                if slot == self._penalised.size:
                    more = np.zeros(max(64, slot), np.int32)
                    self._penalised = np.concatenate([self._penalised, more])
                    self._counts = np.concatenate([self._counts, more])
                self._penalised[slot] = token
                self._num_penalised += 1
            self._counts[slot] += 1
        if self._tracks_output:
            self._output.append(token)
        if self.num_output == self.params.min_tokens:
            self._update_has_lists()

    def fork(self, sample_index: int) -> RowSampling:
        """A copy for another answer of the same request, as it is now; the two then go separate ways."""
        copy = object.__new__(RowSampling)
        for name in self.__slots__:
            setattr(copy, name, getattr(self, name))
        copy.sample_index = sample_index
        fields = list(self._record_fields)
        fields[2] = sample_index
        copy._record_fields = tuple(fields)
        copy.record = _RECORD.pack(*fields, 0, 0, 0, 0, 0, *self._watermark_fields)
        copy._output = list(self._output)
        copy._slots = dict(self._slots)
        copy._penalised = self._penalised.copy()
        copy._counts = self._counts.copy()
        return copy

    def banned_words_next(self) -> list[int]:
        """The tokens that would complete a bad word of several tokens after the output so far."""
        output = self._output
        if not output:
            return []
        found = []
        for word in self._heads.get(output[-1], ()):
            head = len(word) - 1
            if head <= len(output) and tuple(output[-head:]) == word[:-1]:
                found.append(word[-1])
        return found

    def lists(self) -> tuple[list[Ints], tuple[int, int, int, int]]:
        """The arrays for the list pool in the record's order, and the counts the record states for them."""
        banned = self._banned_early if self.num_output < self.params.min_tokens else self._banned
        words = self.banned_words_next() if self._heads else ()
        if words:
            banned = np.concatenate([banned, _ints(words)])
        count = self._num_penalised
        parts = [self._bias, self._allowed, banned, self._penalised[:count], self._counts[:count]]
        return parts, (self._bias.size // 2, self._allowed.size, banned.size, count)


class SamplerBatch:
    """Writes the rows of a step into a native sampler and reads their results.

    ``begin`` starts a step; then ``fill`` or ``fill_prompt_row`` for each row, one native call, and ``results`` or
    ``result``. Pools grow here, before the native call, never in it.
    """

    def __init__(self, sampler: NativeSampler) -> None:
        self.sampler = sampler
        self._max_rows = sampler.max_rows
        bytes_view = memoryview(sampler.records).cast("B")  # type: ignore[arg-type]
        self._bytes = bytes_view
        self._words = bytes_view.cast("i")
        self._quads = bytes_view.cast("q")
        self._tokens = sampler.tokens
        self._logprobs = sampler.logprobs
        self._ranks = sampler.ranks
        self._statuses = sampler.statuses
        self._tops: list[tuple[int, int]] = [(0, 0)] * self._max_rows  # start and count in the top pool
        self._lists = np.zeros(4096, np.int32)
        self._top_ids = np.zeros(1024, np.int32)
        self._top_logprobs = np.zeros(1024, np.float32)
        self._list_end = 0
        self._top_end = 0
        self._may_be_short = False  # whether a row of this step may report fewer tokens than it has places for
        self._set_pools()

    def _set_pools(self) -> None:
        self.sampler.set_pools(self._lists, self._top_ids, self._top_logprobs)

    def begin(self) -> None:
        """Start a step: nothing of the step before is kept."""
        self._list_end = 0
        self._top_end = 0
        self._may_be_short = False
        if self._top_ids.size > _KEPT_TOP_ENTRIES:
            # Whole-vocabulary reports are rare and large: their memory is not kept for the life of the engine.
            self._top_ids, self._top_logprobs = np.zeros(1024, np.int32), np.zeros(1024, np.float32)
            self._set_pools()

    def fill(self, index: int, row: RowSampling, position: int) -> None:
        """Make row ``index`` sample the token at ``position`` (the number of tokens before it) of a sequence."""
        begin = index * RECORD_BYTES
        self._bytes[begin : begin + RECORD_BYTES] = row.record
        self._quads[index * _QUADS + _POSITION] = position
        if row.num_top:
            self._reserve_top(index, row.num_top)
            self._may_be_short |= row.processed
        else:
            self._tops[index] = (0, 0)
        if row.has_lists:
            self._write_lists(index, row)
        if row.watermark:
            self._words[index * _WORDS + _PREVIOUS] = row.previous

    def fill_prompt_row(self, index: int, target_token: int, k: int) -> None:
        """Make row ``index`` report on ``target_token`` and the ``k`` most probable tokens, without sampling."""
        begin = index * RECORD_BYTES
        self._bytes[begin : begin + RECORD_BYTES] = _RECORD.pack(
            0, 0, 0, _PROMPT, 1.0, 1.0, 0.0, 1.0, 0, 1.0, 0.0, 0.0, k, target_token, 0, 0, 0, 0, 0, 0, -1, 0, 0.0, 0
        )
        self._reserve_top(index, k)

    def _reserve_top(self, index: int, count: int) -> None:
        start = self._top_end
        end = self._top_end = start + count
        if end > self._top_ids.size:
            # Rows filled before keep their places; what the pool held is results of the step before.
            size = max(end, 2 * self._top_ids.size)
            self._top_ids = np.zeros(size, np.int32)
            self._top_logprobs = np.zeros(size, np.float32)
            self._set_pools()
        self._words[index * _WORDS + _TOP_START] = start
        self._tops[index] = (start, count)

    def _write_lists(self, index: int, row: RowSampling) -> None:
        parts, counts = row.lists()
        start = end = self._list_end
        needed = start + sum(part.size for part in parts)
        if needed > self._lists.size:
            grown = np.zeros(max(needed, 2 * self._lists.size), np.int32)
            grown[:start] = self._lists[:start]
            self._lists = grown
            self._set_pools()
        for part in parts:
            if part.size:
                self._lists[end : end + part.size] = part
                end += part.size
        self._list_end = end
        word = index * _WORDS + _LIST_START
        words = self._words
        words[word] = start
        words[word + 1], words[word + 2], words[word + 3], words[word + 4] = counts

    def result(self, index: int) -> SampledToken:
        """What row ``index`` came to. Log-probability NaN and rank 0 where none were asked for."""
        status = int(self._statuses[index])
        return SampledToken(
            int(self._tokens[index]),
            float(self._logprobs[index]),
            int(self._ranks[index]),
            self._top(index) if status == 0 else [],
            ERRORS.get(status, "the sampler failed") if status else None,
        )

    def results(self, count: int, start: int = 0) -> list[SampledToken]:
        """What rows ``start`` to ``start + count - 1`` came to: ``result`` of each, but faster."""
        stop = start + count
        tops: list[list[tuple[int, float]]]
        if self._top_end == 0:
            tops = [[] for _ in range(count)]
        else:
            ids, logprobs = self._top_ids[: self._top_end].tolist(), self._top_logprobs[: self._top_end].tolist()
            pairs = list(zip(ids, logprobs, strict=True))
            tops = [pairs[first : first + k] for first, k in self._tops[start:stop]]
            if self._may_be_short:
                tops = [_trimmed(top) for top in tops]
        made = list(
            map(
                SampledToken,
                self._tokens[start:stop].tolist(),
                self._logprobs[start:stop].tolist(),
                self._ranks[start:stop].tolist(),
                tops,
            )
        )
        statuses = self._statuses[start:stop]
        if statuses.any():
            for token, status in zip(made, statuses.tolist(), strict=True):
                if status:
                    token.top = []
                    token.error = ERRORS.get(status, "the sampler failed")
        return made

    def _top(self, index: int) -> list[tuple[int, float]]:
        start, count = self._tops[index]
        if not count:
            return []
        stop = start + count
        return _trimmed(
            list(zip(self._top_ids[start:stop].tolist(), self._top_logprobs[start:stop].tolist(), strict=True))
        )


def _trimmed(top: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Without the places that are left over at the end, whose id is -1."""
    while top and top[-1][0] < 0:
        top.pop()
    return top


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int32)
