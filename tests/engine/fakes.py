"""A back end without a model: simulates the paged KV cache exactly and refuses a step that would read wrong data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from octavo.backends.interface import SampledToken, SequenceWork, StepBatch, StepOutput
from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import EngineRequest, ProducedSequence, SequenceOutput
from octavo.sampling.params import SamplingParams
from octavo.sampling.rows import RowSampling

__all__ = [
    "VOCAB",
    "Answer",
    "FakeBackend",
    "TaggedRow",
    "expected_answer",
    "expected_scores",
    "greedy",
    "make_engine",
    "prompt_of",
    "replayed",
    "request",
    "run",
]

VOCAB = 97
_MASK = (1 << 61) - 1


ROOT = 11


class TaggedRow(RowSampling):
    """A row that remembers where the prompt ends, so that a step can be checked against the output noted so far."""

    __slots__ = ("prompt_len",)


def tagged_row(request: EngineRequest, prompt: np.ndarray, seed: int, index: int, vocab_size: int) -> TaggedRow:
    row = TaggedRow(request.params, seed, index, prompt, request.eos_ids, vocab_size=vocab_size)
    row.prompt_len = len(prompt)
    return row


def advance(state: int, token: int) -> int:
    return (state * 6364136223846793005 + (token + 1) * 1442695040888963407 + 12345) & _MASK


def _pick(state: int, seed: int, index: int, position: int) -> SampledToken:
    mixed = advance(advance(advance(state, seed & 0xFFFF), index), position)
    return SampledToken((mixed >> 17) % VOCAB, -float(mixed & 0xFFFF) / 4096, (mixed & 7) + 1, [])


def _scored(state: int, token: int) -> SampledToken:
    return SampledToken(token, -float(advance(state, token) & 0xFFFF) / 4096, 1, [])


class FakeBackend:
    """Each slot of each block holds (token, hash of all tokens before it), as written.

    `execute` checks that every position a sequence reads holds its own chain, that nobody writes to a block another one
    reads, that copies cannot collide and that the limits of a step are kept. The next token is a hash of the
    chain, the seed, the sample index and the number of output tokens, so any wrong sharing changes the answer.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        max_tokens: int = 1 << 30,
        max_seqs: int = 1 << 30,
        max_model_len: int = 4096,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = VOCAB
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.store: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.steps: list[int] = []  # tokens computed in each step
        self.computed: dict[tuple[int, int], int] = {}  # how often the last position of each full block was computed
        self.fail_next: Exception | None = None
        self.error_tokens: set[int] = set()  # a context ending in one of these yields an error instead of a token

    def execute(self, batch: StepBatch) -> StepOutput:
        if self.fail_next is not None:
            failure, self.fail_next = self.fail_next, None
            raise failure
        work = batch.work
        total = sum(item.count for item in work)
        assert 0 < total <= self.max_tokens
        assert len(work) <= self.max_seqs
        assert len({id(item) for item in work}) == len(work)
        self.steps.append(total)
        self._copy(batch.copies)
        states = [self._read(item) for item in work]
        self._check_writes(work)
        sampled: list[SampledToken | None] = []
        scores: list[list[SampledToken] | None] = []
        for item, state in zip(work, states, strict=True):
            assert (item.row is not None) == (item.sample or item.prompt_logprobs)
            state, scored = self._write(item, state)
            scores.append(scored)
            sampled.append(self._sample(item, state) if item.sample else None)
        return StepOutput(sampled, scores)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        sources = [source for source, _ in copies]
        destinations = [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations)
        assert not set(sources) & set(destinations)
        for source, destination in copies:
            self.store[destination] = list(self.store[source])

    def _read(self, item: SequenceWork) -> int:
        size = self.block_size
        blocks = item.block_table[: -(-(item.start + item.count) // size)].tolist()
        assert len(set(blocks)) == len(blocks)
        assert all(0 <= block < self.num_blocks for block in blocks)
        state = ROOT
        tokens = item.token_ids[: item.start].tolist()
        for position, token in enumerate(tokens):
            found = self.store[blocks[position // size]][position % size]
            assert found == (token, state), f"position {position} of a sequence holds {found}"
            state = advance(state, token)
        return state

    def _check_writes(self, work: list[SequenceWork]) -> None:
        size = self.block_size
        readers: dict[int, int] = {}
        for number, item in enumerate(work):
            for block in item.block_table[: -(-(item.start + item.count) // size)].tolist():
                readers[block] = -1 if block in readers else number
        for number, item in enumerate(work):
            first, last = item.start // size, (item.start + item.count - 1) // size
            for block in item.block_table[first : last + 1].tolist():
                assert readers[block] == number, f"block {block} is written by one sequence and used by another"

    def _write(self, item: SequenceWork, state: int) -> tuple[int, list[SampledToken] | None]:
        size = self.block_size
        end = item.start + item.count
        scored: list[SampledToken] | None = [] if item.prompt_logprobs else None
        tokens = item.token_ids[: end + 1].tolist()
        for position in range(item.start, end):
            token = tokens[position]
            self.store[item.block_table[position // size]][position % size] = (token, state)
            if (position + 1) % size == 0:
                key = (state, token)
                self.computed[key] = self.computed.get(key, 0) + 1
            state = advance(state, token)
            if scored is not None and not (item.sample and position == end - 1):
                scored.append(_scored(state, tokens[position + 1]))
        return state, scored

    def _sample(self, item: SequenceWork, state: int) -> SampledToken:
        row = item.row
        assert isinstance(row, TaggedRow)
        assert item.start + item.count == row.prompt_len + row.num_output
        if int(item.token_ids[item.start + item.count - 1]) in self.error_tokens:
            return SampledToken(0, 0.0, 0, [], "logits are not finite")
        return _pick(state, row.seed, row.sample_index, row.num_output)


class Answer:
    """What one sequence produced."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: list[tuple[int, float] | None] | None = None
        self.num_cached_tokens = 0
        self.error: str | None = None

    def take(self, output: SequenceOutput) -> None:
        assert self.finish_reason is None, "an output came after the last one"
        self.tokens += [token.token for token in output.new_tokens]
        self.logprobs += [token.logprob for token in output.new_tokens]
        assert output.finished == (output.finish_reason is not None)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error = output.error
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = [None if s is None else (s.token, s.logprob) for s in output.prompt_logprobs]

    def same_as(self, other: Answer) -> bool:
        return (
            self.tokens == other.tokens
            and self.logprobs == other.logprobs
            and self.finish_reason == other.finish_reason
            and self.stop_reason == other.stop_reason
        )


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """A prompt of its own for every salt."""
    state = advance(7, salt)
    tokens = []
    for _ in range(length):
        state = advance(state, 1)
        tokens.append((state >> 20) % VOCAB)
    return tokens


def greedy(max_tokens: int | None = 8, **more: Any) -> SamplingParams:
    """Parameters for a sequence that ends at its length unless told otherwise."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "seed": 5} | more))


def request(name: str, prompt: Iterable[int], params: SamplingParams | None = None, **more: Any) -> EngineRequest:
    return EngineRequest(name, list(prompt), params or greedy(), **more)


def make_engine(
    num_blocks: int = 64, *, max_model_len: int = 1024, block_size: int = 16, **more: Any
) -> tuple[Engine, FakeBackend]:
    config = EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len, block_size=block_size, **more)
    backend = FakeBackend(
        num_blocks,
        block_size,
        max_tokens=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
    )
    return Engine(config, backend, row_factory=tagged_row), backend


def run(
    engine: Engine, requests: Iterable[EngineRequest] = (), *, steps: int = 100_000, check: bool = True
) -> dict[tuple[str, int], Answer]:
    """Add the requests, run until nothing is left, check the KV cache after every step."""
    answers: dict[tuple[str, int], Answer] = {}
    for item in requests:
        engine.add(item)
    while engine.has_work():
        collect(engine.step(), answers)
        if check:
            assert engine.check() == []
        steps -= 1
        assert steps > 0, "the engine did not finish in time"
    return answers


def collect(outputs: Iterable[SequenceOutput], answers: dict[tuple[str, int], Answer]) -> None:
    for output in outputs:
        answers.setdefault((output.request_id, output.index), Answer()).take(output)


def replayed(item: EngineRequest, answers: Mapping[tuple[str, int], Answer]) -> EngineRequest | None:
    """The request to give to a new engine after these answers of a lost one; None when nothing is left to do."""
    found = [answers.get((item.request_id, index), Answer()) for index in range(item.params.num_sequences)]
    if all(answer.finish_reason is not None for answer in found):
        return None
    produced = [ProducedSequence(list(answer.tokens), answer.finish_reason is not None) for answer in found]
    return replace(item, produced=produced)


def expected_answer(item: EngineRequest, index: int = 0, max_model_len: int = 1024) -> Answer:
    """What a sequence must produce, worked out without an engine."""
    answer = Answer()
    params = item.params
    state = ROOT
    for token in item.prompt_ids:
        state = advance(state, int(token))
    stops = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(item.eos_ids))
    seed = params.seed if params.seed is not None else item.seed
    assert seed is not None
    while answer.finish_reason is None:
        picked = _pick(state, seed & ((1 << 64) - 1), index, len(answer.tokens))
        answer.tokens.append(picked.token)
        answer.logprobs.append(picked.logprob)
        state = advance(state, picked.token)
        count = len(answer.tokens)
        if picked.token in stops and count >= params.min_tokens:
            answer.finish_reason = "stop"
            if picked.token not in item.eos_ids or params.ignore_eos:
                answer.stop_reason = picked.token
        elif count == params.max_tokens or len(item.prompt_ids) + count >= max_model_len:
            answer.finish_reason = "length"
    return answer


def expected_scores(item: EngineRequest) -> list[tuple[int, float] | None]:
    """The prompt log-probabilities a request must get."""
    state = ROOT
    scores: list[tuple[int, float] | None] = [None]
    prompt = [int(token) for token in item.prompt_ids]
    for token, following in pairwise(prompt):
        state = advance(state, token)
        found = _scored(state, following)
        scores.append((found.token, found.logprob))
    return scores
