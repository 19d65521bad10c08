"""Draws follow the distribution they should: chi-square tests with fixed seeds, so they either always or never pass."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.sampling import reference
from octavo.sampling.params import SamplingParams


def _assert_fits(tokens: np.ndarray, p: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=p.size)
    assert counts[p == 0].sum() == 0
    expected = p * tokens.size
    # Tokens of small expectation are taken together, as the test asks.
    big = expected >= 8
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = max(1, wanted.size - 1)
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom)


RULES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.8, "top_p": 0.8},
    {"top_k": 12},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_positions_of_one_sequence_draw_the_distribution(make_runner, rule):
    logits = (np.random.default_rng(8).standard_normal(200) * 1.5).astype(np.float32)
    tokens = make_runner(200, max_rows=500).draws(logits, SamplingParams(**rule), 20_000, seed=1)
    _assert_fits(tokens, reference.distribution(logits, **rule))


def test_seeds_draw_the_distribution_at_one_position(make_runner):
    logits = (np.random.default_rng(9).standard_normal(60)).astype(np.float32)
    runner = make_runner(60, max_rows=500)
    params = SamplingParams()
    tokens = []
    for start in range(0, 10_000, 500):
        rows = [(runner.row(params, seed), 17) for seed in range(start, start + 500)]
        tokens += [result.token for result in runner.many(logits, rows)]
    _assert_fits(np.array(tokens), reference.distribution(logits))


def test_the_answers_of_one_request_draw_the_distribution(make_runner):
    logits = (np.random.default_rng(10).standard_normal(60)).astype(np.float32)
    runner = make_runner(60, max_rows=500)
    first = runner.row(SamplingParams(), 3)
    tokens = []
    for start in range(0, 10_000, 500):
        rows = [(first.fork(index), 17) for index in range(start, start + 500)]
        tokens += [result.token for result in runner.many(logits, rows)]
    _assert_fits(np.array(tokens), reference.distribution(logits))


def test_neighbouring_positions_are_independent(make_runner):
    logits = np.zeros(8)
    tokens = make_runner(8, max_rows=500).draws(logits, SamplingParams(), 40_000, seed=4)
    pairs = tokens[0::2] * 8 + tokens[1::2]
    _assert_fits(pairs, np.full(64, 1 / 64))
