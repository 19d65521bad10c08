"""The native sampler's rules against the numpy reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.sampling import reference
from octavo.sampling.params import SamplingParams


def _logits(vocab: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def _assert_drawn_like_reference(tokens: np.ndarray, p: np.ndarray, seed: int = 0) -> None:
    """Each token is the one whose cumulative interval holds the position's number, up to float32 rounding."""
    cumulative = np.cumsum(p)
    for position, token in enumerate(tokens):
        u = reference.uniform(seed, 0, position)
        assert p[token] > 0.0, f"token {token} is not among those kept"
        assert cumulative[token] - p[token] - 2e-6 <= u <= cumulative[token] + 2e-6


RULES = {
    "temperature alone": {"temperature": 0.7},
    "temperature one": {},
    "a high temperature": {"temperature": 2.0},
    "a low temperature": {"temperature": 0.01},
    "top_k of one": {"top_k": 1},
    "top_k": {"top_k": 20},
    "a top_k above the number of blocks": {"top_k": 300},
    "top_k above the vocabulary": {"top_k": 100_000},
    "top_p": {"top_p": 0.9},
    "a tiny top_p": {"top_p": 1e-6},
    "a top_p near one": {"top_p": 0.9999},
    "min_p": {"min_p": 0.1},
    "min_p of one": {"min_p": 1.0},
    "typical_p": {"typical_p": 0.8},
    "a tiny typical_p": {"typical_p": 1e-6},
    "top_k then top_p": {"top_k": 30, "top_p": 0.8, "temperature": 1.3},
    "min_p then top_p": {"min_p": 0.02, "top_p": 0.8, "temperature": 1.3},
    "top_p then typical_p": {"top_p": 0.95, "typical_p": 0.7},
    "all together": {"temperature": 0.8, "min_p": 0.001, "top_k": 200, "top_p": 0.97, "typical_p": 0.9},
}


@pytest.mark.parametrize("vocab", [1, 5, 64, 65, 1000, 4099])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_each_rule_draws_what_the_reference_draws(make_runner_of_level, vocab, rule):
    logits = _logits(vocab, seed=vocab)
    runner = make_runner_of_level(vocab, max_rows=40)
    tokens = runner.draws(logits, SamplingParams(**rule), 40)
    rule = {"temperature": 1.0, **rule}
    _assert_drawn_like_reference(tokens, reference.distribution(logits, **rule))


@pytest.mark.parametrize("scale", [0.0, 0.01, 30.0, 1e4, 1e30])
@pytest.mark.parametrize("rule", [{}, {"top_k": 7}, {"top_p": 0.9}, {"typical_p": 0.5}], ids=str)
def test_flat_and_enormous_logits_are_drawn_like_the_reference(make_runner_of_level, scale, rule):
    logits = _logits(513, seed=3, scale=scale)
    tokens = make_runner_of_level(513, max_rows=32).draws(logits, SamplingParams(**rule), 32)
    _assert_drawn_like_reference(tokens, reference.distribution(logits, **rule))


@pytest.mark.parametrize("vocab", [1, 63, 64, 200, 4099])
def test_greedy_takes_the_most_probable_token(make_runner_of_level, vocab):
    for seed in range(5):
        logits = _logits(vocab, seed)
        result = make_runner_of_level(vocab).one(logits, SamplingParams(temperature=0))
        assert result.token == int(np.argmax(logits))
        assert math.isnan(result.logprob)
        assert result.top == []


def test_greedy_ties_go_to_the_lowest_id(make_runner):
    logits = np.full(300, -1.0, np.float32)
    logits[[70, 71, 250]] = 2.0
    assert make_runner(300).one(logits, SamplingParams(temperature=0)).token == 70


def test_negative_zero_ties_with_zero(make_runner):
    logits = np.full(10, -1.0, np.float32)
    logits[3], logits[5] = -0.0, 0.0
    runner = make_runner(10)
    result = runner.one(logits, SamplingParams(temperature=0, logprobs=2))
    assert (result.token, result.rank) == (3, 1)
    assert [token for token, _ in result.top] == [3, 5]


def test_top_k_keeps_exactly_k_and_of_ties_the_lowest_ids(make_runner):
    logits = np.zeros(500, np.float32)
    logits[400] = 1.0
    tokens = make_runner(500, max_rows=64).draws(logits, SamplingParams(top_k=4), 640)
    assert set(tokens.tolist()) == {0, 1, 2, 400}


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
def test_top_p_keeps_a_token_while_those_before_it_have_less(make_runner, top_p, kept):
    tokens = make_runner(4, max_rows=64).draws(np.zeros(4), SamplingParams(top_p=top_p), 256)
    assert set(tokens.tolist()) == set(range(kept))


def test_typical_p_keeps_all_ties(make_runner):
    tokens = make_runner(70, max_rows=64).draws(np.zeros(70), SamplingParams(typical_p=0.1), 1280)
    assert set(tokens.tolist()) == set(range(70))


def test_typical_p_can_leave_out_the_most_probable_token(make_runner):
    p = np.array([0.4] + [0.06] * 10)
    tokens = make_runner(11, max_rows=64).draws(np.log(p), SamplingParams(typical_p=0.5), 256)
    assert 0 not in tokens


def test_minus_infinity_is_never_drawn(make_runner):
    logits = np.full(200, -np.inf, np.float32)
    logits[[10, 150]] = 0.0
    runner = make_runner(200, max_rows=64)
    for rule in ({}, {"top_k": 50}, {"top_p": 0.99}, {"typical_p": 0.99}, {"min_p": 0.0, "top_k": 150}):
        assert set(runner.draws(logits, SamplingParams(**rule), 64).tolist()) == {10, 150}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_biases_and_bans_follow_the_reference(make_runner, temperature):
    rng = np.random.default_rng(7)
    vocab, eos = 400, (17, 18)
    runner = make_runner(vocab)
    choices = {
        "repetition_penalty": [1.0, 1.3, 0.8],
        "presence_penalty": [0.0, 0.7, -1.0],
        "frequency_penalty": [0.0, 0.4, -0.5],
        "logit_bias": [None, {5: 3.5, 399: -100.0, 17: 100.0}],
        "allowed_token_ids": [None, [5, 17, 18, 30, 31, 32, 33, 399]],
        "min_tokens": [0, 100],
        "stop_token_ids": [None, [30]],
    }
    for seed in range(60):
        picked = {name: values[rng.integers(len(values))] for name, values in choices.items()}
        params = SamplingParams(temperature=temperature, max_tokens=None, logprobs=3, **picked)
        logits = _logits(vocab, seed)
        state = {
            "prompt_ids": rng.integers(0, vocab, 50).tolist(),
            "output_ids": rng.integers(0, 40, int(rng.integers(0, 30))).tolist(),
            "eos_ids": eos,
        }
        result = runner.one(logits, params, seed, **state)
        expected = reference.reference_row(logits, params, seed, 0, **state)
        assert result.token == expected.token, picked
        assert result.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert result.rank == expected.rank
        assert [token for token, _ in result.top] == expected.top(3)


def test_bad_words_ban_the_token_that_would_complete_them(make_runner):
    class Encoder:
        def encode(self, text, add_special_tokens=True):
            return [1, 2, 3] if text == "one" else [4]

    params = SamplingParams(temperature=0, bad_words=["one", "two"]).with_bad_words_ids(Encoder())
    logits = np.array([0.0, 1.0, 2.0, 3.0, 4.0], np.float32)
    runner = make_runner(5)
    assert runner.one(logits, params).token == 3
    assert runner.one(logits, params, output_ids=[1, 2]).token == 2
    assert runner.one(logits, params, output_ids=[2]).token == 3
    assert runner.one(logits, params, output_ids=[1, 2, 0]).token == 3


def test_end_tokens_are_banned_until_min_tokens(make_runner):
    logits = np.array([0.0, 1.0, 5.0, 4.0], np.float32)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    runner = make_runner(4)
    assert runner.one(logits, params, eos_ids=(2,)).token == 1
    assert runner.one(logits, params, eos_ids=(2,), output_ids=[1]).token == 1
    assert runner.one(logits, params, eos_ids=(2,), output_ids=[1, 1]).token == 2


@pytest.mark.parametrize("k", [0, 1, 5, 20, 65, 1000, 4099])
def test_log_probabilities_and_top_lists_are_those_of_the_raw_logits(make_runner_of_level, k):
    vocab = 4099
    logits = _logits(vocab, 11)
    logits[500:520] = logits[3000]  # ties
    expected = reference.log_softmax(logits)
    runner = make_runner_of_level(vocab)
    params = SamplingParams(
        temperature=0.5, top_k=5, logprobs=k, logit_bias={7: 30.0}, presence_penalty=1.0, repetition_penalty=2.0
    )
    result = runner.one(logits, params, prompt_ids=[1, 2], output_ids=[3, 4])
    assert result.logprob == pytest.approx(expected[result.token], abs=2e-5)
    assert result.rank == reference.rank(logits, result.token)
    assert [token for token, _ in result.top] == reference.descending(logits)[:k].tolist()
    np.testing.assert_allclose(
        [value for _, value in result.top], expected[reference.descending(logits)[:k]], atol=2e-5
    )


def test_all_of_the_vocabulary_is_reported_for_minus_one(make_runner):
    result = make_runner(130).one(_logits(130), SamplingParams(temperature=0, logprobs=-1))
    assert len(result.top) == 130


def test_prompt_rows_report_the_target_token(make_runner):
    vocab = 777
    logits = _logits(vocab, 5)
    runner = make_runner(vocab)
    runner.batch.begin()
    targets = [0, 63, 64, 776, 300]
    for i, target in enumerate(targets):
        runner.batch.fill_prompt_row(i, target, 2 * i)
    runner.sampler.sample(np.tile(logits, (5, 1)), 5)
    for i, (target, result) in enumerate(zip(targets, runner.batch.results(5), strict=True)):
        alone = runner.batch.result(i)
        assert (result.logprob, result.rank, result.top) == (alone.logprob, alone.rank, alone.top)
        assert result.token == target
        assert result.logprob == pytest.approx(reference.log_softmax(logits)[target], abs=1e-5)
        assert result.rank == reference.rank(logits, target)
        assert [token for token, _ in result.top] == reference.descending(logits)[: 2 * i].tolist()


def test_equal_logits_rank_by_id(make_runner_of_level):
    runner = make_runner_of_level(300)
    targets = [0, 10, 64, 130, 191, 256, 299]
    runner.batch.begin()
    for i, target in enumerate(targets):
        runner.batch.fill_prompt_row(i, target, 0)
    runner.sampler.sample(np.zeros((7, 300), np.float32), 7)
    assert [result.rank for result in runner.batch.results(7)] == [target + 1 for target in targets]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_p=0.5, logprobs=2)], ids=["greedy", "random"]
)
def test_a_row_with_non_finite_logits_fails_alone(make_runner_of_level, bad, params):
    runner = make_runner_of_level(100)
    rows = np.tile(_logits(100), (3, 1))
    rows[1, 99] = bad
    row = runner.row(params)
    runner.batch.begin()
    for i in range(3):
        runner.batch.fill(i, row, 4)
    runner.sampler.sample(rows, 3)
    first, second, third = runner.batch.results(3)
    assert second.error is not None
    assert "finite" in second.error
    assert second.top == []
    assert first.error is None
    assert (first.token, first.rank, first.top) == (third.token, third.rank, third.top)


def test_a_non_finite_logit_is_found_even_where_it_is_masked_out(make_runner):
    logits = _logits(100)
    logits[50] = np.nan
    assert make_runner(100).one(logits, SamplingParams(temperature=0, allowed_token_ids=[1])).error is not None


def test_a_row_where_nothing_may_be_generated_says_so(make_runner):
    params = SamplingParams(temperature=0, allowed_token_ids=[2], min_tokens=1)
    result = make_runner(10).one(_logits(10), params, eos_ids=(2,))
    assert result.error is not None
    assert "allowed_token_ids" in result.error
    assert make_runner(10).one(np.full(10, -np.inf), SamplingParams()).error is not None
