"""Watermarked rows: the green lists of torch, the reference's tokens, and no effect on rows without a watermark."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo import _native
from octavo.sampling import reference
from octavo.sampling.params import SamplingParams
from octavo.sampling.rows import RowSampling


def _logits(vocab: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def _native_list(previous: int, vocab: int, count: int) -> list[int]:
    out = np.empty(count, np.int32)
    _native.green_list(previous, vocab, out)
    return out.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 3, 623, 624, 625, 5000, 32_000, 49_152, 151_936])
def test_green_lists_are_those_of_torch(vocab):
    rng = np.random.default_rng(vocab)
    for previous in {0, 1, vocab - 1, *rng.integers(0, vocab, 6).tolist()}:
        generator = torch.Generator("cpu").manual_seed(15485863 * previous)
        expected = torch.randperm(vocab, generator=generator).tolist()
        for count in (0, vocab // 4, vocab // 2, vocab):
            assert _native_list(previous, vocab, count) == expected[:count]


@pytest.mark.parametrize("previous", [0, 277, 999])
def test_the_reference_lists_are_the_native_ones(previous):
    assert reference.green_list(previous, 1000, 0.25).tolist() == _native_list(previous, 1000, 250)


def test_a_green_list_is_known_by_heart():
    # Kept from torch 2.13, so that this holds where another torch is installed.
    assert _native_list(504, 49_152, 6) == KNOWN


KNOWN = [35667, 10976, 38023, 30766, 32883, 2624]


def test_impossible_lists_are_refused():
    for previous, vocab, count in ((-1, 10, 1), (0, 0, 0), (0, 10, 11), (0, 1 << 40, 1)):
        with pytest.raises(ValueError, match="green_list"):
            _native.green_list(previous, vocab, np.empty(count, np.int32))


CHOICES = {
    "watermark_gamma": [0.5, 0.25, 0.9],
    "watermark_delta": [2.0, 0.5, 10.0],
    "temperature": [0.0, 0.8, 1.0],
    "repetition_penalty": [1.0, 1.3],
    "frequency_penalty": [0.0, 0.4],
    "logit_bias": [None, {5: 3.5, 399: -100.0, 17: 100.0}],
    "allowed_token_ids": [None, [5, 17, 18, 30, 31, 32, 33, 399]],
    "top_k": [0, 20],
    "top_p": [1.0, 0.9],
    "logprobs": [None, 3],
}


def test_watermarked_rows_follow_the_reference(make_runner_of_level):
    rng = np.random.default_rng(7)
    runner = make_runner_of_level(400)
    for seed in range(80):
        picked = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
        params = SamplingParams(watermark=True, **picked)
        logits = _logits(400, seed)
        state = {
            "prompt_ids": rng.integers(0, 400, 20).tolist(),
            "output_ids": rng.integers(0, 40, int(rng.integers(0, 20))).tolist(),
        }
        result = runner.one(logits, params, seed, **state)
        expected = reference.reference_row(logits, params, seed, 0, **state)
        assert result.token == expected.token, picked
        if params.logprobs is not None:
            assert result.logprob == pytest.approx(expected.logprob, abs=1e-5)
            assert result.rank == expected.rank
            assert [token for token, _ in result.top] == expected.top(3)


def test_the_last_token_before_decides_whether_of_prompt_or_output(make_runner):
    runner = make_runner(1000)
    params = SamplingParams(temperature=0, watermark=True, watermark_delta=100.0)
    logits = _logits(1000)

    def chosen(**state) -> int:
        return runner.one(logits, params, **state).token

    after_seven = chosen(prompt_ids=[7])
    assert chosen(prompt_ids=[1, 2, 7]) == chosen(prompt_ids=[1], output_ids=[3, 7]) == after_seven
    assert after_seven in set(_native_list(7, 1000, 500))
    assert len({chosen(prompt_ids=[previous]) for previous in range(30)}) > 3


def test_a_row_lives_through_appends_resets_and_forks(make_runner):
    params = SamplingParams(watermark=True)
    row = RowSampling(params, 0, 0, [4, 9], vocab_size=50)
    assert row.previous == 9
    row.append(3)
    fork = row.fork(1)
    fork.append(8)
    assert (row.previous, fork.previous) == (3, 8)
    row.reset([5, 6])
    assert row.previous == 6
    row.reset()
    assert row.previous == 9
    runner = make_runner(50)
    logits = np.zeros(50)
    made = RowSampling(params, 0, 1, [4, 9], vocab_size=50, output_ids=[3, 8])
    assert runner.many(logits, [(fork, 4)])[0].token == runner.many(logits, [(made, 4)])[0].token


def test_a_sequence_without_any_token_before_has_no_green_list(make_runner):
    runner = make_runner(100)
    plain, marked = SamplingParams(), SamplingParams(watermark=True, watermark_delta=50.0)
    assert [runner.one(_logits(100, i), marked).token for i in range(20)] == [
        runner.one(_logits(100, i), plain).token for i in range(20)
    ]


def test_rows_without_a_watermark_are_the_same_beside_watermarked_ones(make_runner):
    rng = np.random.default_rng(3)
    runner = make_runner(1500, max_rows=12)
    plain = [
        runner.row(SamplingParams(temperature=0.8, logprobs=2), seed=i, prompt_ids=[1, 2, 3 + i]) for i in range(6)
    ]
    marked = [
        runner.row(SamplingParams(watermark=True, logprobs=2), seed=i, prompt_ids=[1, 2, 3 + i]) for i in range(6)
    ]
    logits = (rng.standard_normal((12, 1500)) * 4).astype(np.float32)

    def run(order: list[int]) -> dict[int, tuple]:
        rows = [*plain, *marked]
        runner.batch.begin()
        for place, i in enumerate(order):
            runner.batch.fill(place, rows[i], 9)
        runner.sampler.sample(np.ascontiguousarray(logits[order]), len(order))
        results = runner.batch.results(len(order))
        return {i: (r.token, r.logprob, r.rank, r.top) for i, r in zip(order, results, strict=True)}

    alone = {i: run([i])[i] for i in range(12)}
    for _ in range(10):
        order = rng.permutation(12)[: rng.integers(1, 13)].tolist()
        assert run(order) == {i: alone[i] for i in order}


def test_green_tokens_gain_the_share_the_delta_gives_them(make_runner):
    runner = make_runner(2000, max_rows=1)
    delta, gamma = 2.0, 0.5
    params = SamplingParams(watermark=True, watermark_gamma=gamma, watermark_delta=delta)
    green = set(_native_list(11, 2000, 1000))
    hits = 0
    for seed in range(1000):
        hits += runner.one(np.zeros(2000), params, seed, prompt_ids=[11]).token in green
    share = gamma * np.exp(delta) / (gamma * np.exp(delta) + 1 - gamma)
    assert abs(hits / 1000 - share) < 0.04
