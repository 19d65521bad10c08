"""Processed log-probabilities: those of what a token is drawn from, after everything a request asks for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.sampling import reference
from octavo.sampling.params import SamplingParams

PROCESSED = {"logprobs_mode": "processed"}


def _logits(vocab: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


RULES = {
    "nothing": {},
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 4},
    "a large top_k": {"top_k": 300, "temperature": 1.2},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "all warpers": {"temperature": 0.8, "min_p": 0.001, "top_k": 200, "top_p": 0.97, "typical_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 2.0},
    "bias and bans": {"logit_bias": {3: 5.0, 7: -100.0}, "min_tokens": 90, "max_tokens": 100, "temperature": 1.5},
    "allowed ids": {"allowed_token_ids": [1, 5, 9, 40, 63]},
    "greedy with allowed ids": {"allowed_token_ids": [1, 5, 9, 40, 63], "temperature": 0},
    "watermark": {"watermark": True, "temperature": 0.9, "top_p": 0.9},
}


@pytest.mark.parametrize("vocab", [64, 65, 1000])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_token_rank_and_list_are_those_of_the_reference(make_runner_of_level, vocab, rule):
    runner = make_runner_of_level(vocab)
    params = SamplingParams(logprobs=8, **rule, **PROCESSED)
    state = {"prompt_ids": [3, 4, 9], "output_ids": [5, 5, 11], "eos_ids": (17,)}
    for seed in range(12):
        logits = _logits(vocab, seed)
        result = runner.one(logits, params, seed, **state)
        expected = reference.reference_row(logits, params, seed, 0, **state)
        assert result.token == expected.token
        assert result.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert result.rank == expected.rank
        assert [token for token, _ in result.top] == expected.top(8)
        assert [value for _, value in result.top] == pytest.approx(expected.logprobs[expected.top(8)], abs=2e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_reporting_changes_no_token(make_runner, rule):
    runner = make_runner(1000)
    for seed in range(12):
        logits = _logits(1000, seed)
        silent = runner.one(logits, SamplingParams(**rule, **PROCESSED), seed, prompt_ids=[3, 4], output_ids=[5])
        assert math.isnan(silent.logprob)
        for mode in ("raw", "processed"):
            params = SamplingParams(**rule, logprobs=3, logprobs_mode=mode)
            assert runner.one(logits, params, seed, prompt_ids=[3, 4], output_ids=[5]).token == silent.token


def test_the_probabilities_of_all_that_can_be_drawn_sum_to_one(make_runner):
    runner = make_runner(500)
    for rule in ({}, {"top_k": 40}, {"top_p": 0.9, "temperature": 0.5}, {"typical_p": 0.7}, {"temperature": 0}):
        result = runner.one(_logits(500), SamplingParams(logprobs=-1, **rule, **PROCESSED))
        assert sum(math.exp(value) for _, value in result.top) == pytest.approx(1.0, abs=1e-5)


def test_a_single_choice_is_certain_and_alone_in_its_list(make_runner):
    result = make_runner(500).one(_logits(500), SamplingParams(top_k=1, logprobs=5, **PROCESSED))
    assert (result.logprob, result.rank) == (0.0, 1)
    assert result.top == [(result.token, 0.0)]


def test_a_list_is_shorter_than_asked_where_less_can_be_drawn(make_runner):
    runner = make_runner(300)
    logits = _logits(300)
    params = SamplingParams(logprobs=20, allowed_token_ids=[7, 200, 250], **PROCESSED)
    others = SamplingParams(logprobs=4)
    runner.batch.begin()
    for i, p in enumerate([params, others, params]):
        runner.batch.fill(i, runner.row(p), 0)
    runner.sampler.sample(np.tile(logits, (3, 1)), 3)
    first, second, third = runner.batch.results(3)
    assert {token for token, _ in first.top} == {7, 200, 250}
    assert len(second.top) == 4
    assert third.top == first.top == runner.batch.result(0).top
    assert all(math.isfinite(value) for _, value in first.top)


def test_tokens_far_below_at_a_low_temperature_are_still_listed(make_runner):
    logits = np.array([0.0, -1.0, -2.0, -np.inf], np.float32)
    result = make_runner(4).one(logits, SamplingParams(temperature=0.01, logprobs=4, **PROCESSED))
    assert [token for token, _ in result.top] == [0, 1, 2]
    assert [value for _, value in result.top] == pytest.approx([0.0, -100.0, -200.0])


def test_differences_beyond_floating_point_are_left_out(make_runner):
    logits = np.array([3e38, 0.0, -3e38], np.float32)
    result = make_runner(3).one(logits, SamplingParams(temperature=1e-5, logprobs=3, **PROCESSED))
    assert result.top == [(0, 0.0)]


def test_a_dropped_most_probable_token_leaves_its_rank_to_the_next(make_runner):
    p = np.array([0.4] + [0.06] * 10)
    result = make_runner(11).one(np.log(p), SamplingParams(typical_p=0.5, logprobs=11, **PROCESSED))
    assert [token for token, _ in result.top] == list(range(1, 11))
    assert result.rank == result.token
    assert result.logprob == pytest.approx(math.log(0.1), abs=1e-5)


def test_prompt_rows_stay_raw(make_runner):
    runner = make_runner(100)
    logits = _logits(100)
    runner.batch.begin()
    runner.batch.fill(0, runner.row(SamplingParams(temperature=0.2, logprobs=3, **PROCESSED)), 0)
    runner.batch.fill_prompt_row(1, 42, 3)
    runner.sampler.sample(np.tile(logits, (2, 1)), 2)
    _, prompt = runner.batch.results(2)
    assert prompt.logprob == pytest.approx(reference.log_softmax(logits)[42], abs=1e-5)
    assert [token for token, _ in prompt.top] == reference.descending(logits)[:3].tolist()
