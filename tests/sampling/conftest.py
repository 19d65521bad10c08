"""Helpers of the sampling tests: a small sampler, and running one row or many positions of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from octavo import _native
from octavo.backends.interface import SampledToken
from octavo.sampling.params import SamplingParams
from octavo.sampling.rows import RowSampling, SamplerBatch

Logits = Sequence[float] | np.ndarray


class Runner:
    """Runs rows of one native sampler from Python."""

    def __init__(self, vocab: int, max_rows: int = 8, workers: int = 1, level: str = "") -> None:
        self.vocab = vocab
        self.sampler = _native.Sampler(vocab, max_rows, vocab, workers, level)
        self.batch = SamplerBatch(self.sampler)

    def row(self, params: SamplingParams, seed: int = 0, index: int = 0, **state: Any) -> RowSampling:
        return RowSampling(params, seed, index, vocab_size=self.vocab, **state)

    def many(self, logits: Logits, work: Sequence[tuple[RowSampling, int]]) -> list[SampledToken]:
        """Samples the same logits once for each (row, position)."""
        rows = np.tile(np.asarray(logits, np.float32), (len(work), 1))
        self.batch.begin()
        for i, (row, position) in enumerate(work):
            self.batch.fill(i, row, position)
        self.sampler.sample(rows, len(work))
        return self.batch.results(len(work))

    def one(self, logits: Logits, params: SamplingParams, seed: int = 0, **state: Any) -> SampledToken:
        row = self.row(params, seed, **state)
        position = len(state.get("prompt_ids", ())) + len(state.get("output_ids", ()))
        return self.many(logits, [(row, position)])[0]

    def draws(self, logits: Logits, params: SamplingParams, count: int, seed: int = 0) -> np.ndarray:
        """Tokens drawn at positions 0 to count - 1."""
        row = self.row(params, seed)
        tokens: list[int] = []
        step = self.sampler.max_rows
        for start in range(0, count, step):
            results = self.many(logits, [(row, p) for p in range(start, min(count, start + step))])
            assert all(result.error is None for result in results)
            tokens += [result.token for result in results]
        return np.array(tokens)


@pytest.fixture
def make_runner() -> Callable[..., Runner]:
    return Runner


@pytest.fixture(params=_native.available_levels())
def level(request: pytest.FixtureRequest) -> str:
    """Each instruction-set level of this machine in turn."""
    return str(request.param)


@pytest.fixture
def make_runner_of_level(level: str) -> Callable[..., Runner]:
    return partial(Runner, level=level)
