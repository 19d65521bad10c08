"""RowSampling and SamplerBatch: the state of a sequence through appends, forks and recomputation, and pool growth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ParameterError
from octavo.sampling import reference
from octavo.sampling.params import SamplingParams
from octavo.sampling.rows import RowSampling

VOCAB = 50
PENALTIES = SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3)


def _row(params, **state) -> RowSampling:
    return RowSampling(params, 0, vocab_size=VOCAB, **state)


def _counts(row: RowSampling) -> dict[int, int]:
    parts, (_, _, _, count) = row.lists()
    assert parts[3].size == parts[4].size == count
    return dict(zip(parts[3].tolist(), parts[4].tolist(), strict=True))


def _banned(row: RowSampling) -> set[int]:
    return set(row.lists()[0][2].tolist())


def test_a_simple_row_has_no_lists():
    row = _row(SamplingParams(top_p=0.9, seed=3), prompt_ids=[1, 2], eos_ids=(4,))
    row.append(5)
    assert not row.has_lists
    assert row.num_output == 1


def test_counts_follow_the_output():
    row = _row(PENALTIES, prompt_ids=[3, 3, 9])
    for token in (9, 5, 5, 7):
        row.append(token)
    assert _counts(row) == {3: 0, 9: 1, 5: 2, 7: 1}


def test_a_reset_counts_each_token_once():
    row = _row(PENALTIES, prompt_ids=[3])
    for token in (5, 5, 6):
        row.append(token)
    before = _counts(row)
    row.reset([5, 5, 6])
    assert _counts(row) == before
    assert row.num_output == 3
    row.reset()
    assert _counts(row) == {3: 0}


def test_a_row_made_with_an_output_equals_one_that_lived_through_it():
    output = [1, 2, 1, 30, 31, 1]
    lived = _row(PENALTIES, prompt_ids=[2])
    for token in output:
        lived.append(token)
    assert _counts(_row(PENALTIES, prompt_ids=[2], output_ids=output)) == _counts(lived)


def test_a_fork_goes_its_own_way():
    row = _row(PENALTIES, prompt_ids=[3], output_ids=[4])
    fork = row.fork(1)
    fork.append(4)
    fork.append(8)
    row.append(9)
    assert _counts(row) == {3: 0, 4: 1, 9: 1}
    assert _counts(fork) == {3: 0, 4: 2, 8: 1}
    assert (row.sample_index, fork.sample_index) == (0, 1)
    assert row.record != fork.record


def test_a_fork_with_bad_words_keeps_its_own_output():
    params = SamplingParams(bad_words=["ab"]).with_bad_words_ids(_Letters())
    row = _row(params)
    fork = row.fork(1)
    fork.append(1)
    assert _banned(fork) == {2}
    assert _banned(row) == set()


class _Letters:
    def encode(self, text, add_special_tokens=True):
        return [ord(c) - 96 for c in text.strip()]


def test_end_tokens_stop_being_banned_at_min_tokens():
    row = _row(SamplingParams(min_tokens=2, stop_token_ids=[7]), eos_ids=(4, 5, 999))
    assert _banned(row) == {4, 5, 7}
    row.append(1)
    assert _banned(row) == {4, 5, 7}
    row.append(1)
    assert not row.has_lists


def test_bad_words_without_ids_are_refused():
    with pytest.raises(ParameterError, match="with_bad_words_ids"):
        _row(SamplingParams(bad_words=["a"]))


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ParameterError, match="logit_bias"):
        _row(SamplingParams(logit_bias={VOCAB: 1.0}))
    with pytest.raises(ParameterError, match="prompt_token_ids"):
        _row(PENALTIES, prompt_ids=[0, VOCAB])
    with pytest.raises(ParameterError, match="bad_words"):
        RowSampling(SamplingParams(bad_words=["z"]).with_bad_words_ids(_Letters()), 0, vocab_size=20)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=6),
    output=st.lists(st.integers(0, 2), max_size=12),
)
def test_bad_words_ban_what_the_reference_bans(words, output):
    params = SamplingParams(bad_words=["x"])
    object.__setattr__(params, "bad_words_ids", tuple(dict.fromkeys(words)))
    row = _row(params)
    for token in output:
        row.append(token)
    assert _banned(row) == reference.banned_by_words(words, output)


def test_pools_grow_while_a_step_is_filled(make_runner):
    vocab = 5000
    runner = make_runner(vocab, max_rows=6)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(vocab).astype(np.float32)
    allowed = rng.permutation(vocab)[:3000].tolist()
    params = [
        SamplingParams(temperature=0, logit_bias={1: 9.0}, logprobs=2),
        SamplingParams(temperature=0, allowed_token_ids=allowed, logprobs=-1),
        SamplingParams(temperature=0, allowed_token_ids=allowed[:10], logprobs=-1),
        SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=1),
        SamplingParams(temperature=0),
    ]
    rows = [runner.row(p, prompt_ids=range(4000)) for p in params]
    for _ in range(2):
        results = runner.many(logits, [(row, 4000) for row in rows])
        for p, result in zip(params, results, strict=True):
            expected = reference.reference_row(logits, p, 0, prompt_ids=range(4000))
            assert result.token == expected.token
            k = p.num_logprobs(vocab)
            assert [token for token, _ in result.top] == expected.top(k or 0)


def test_a_huge_report_does_not_keep_its_memory(make_runner):
    runner = make_runner(20_000, max_rows=64)
    row = runner.row(SamplingParams(temperature=0, logprobs=-1))
    results = runner.many(np.arange(20_000), [(row, 0)] * 60)
    assert all(result.top[-1][0] == 0 for result in results)
    assert runner.one(np.arange(20_000), SamplingParams(temperature=0, logprobs=1)).top[0][0] == 19_999
    assert runner.batch._top_ids.size == 1024


def test_long_outputs_grow_the_counts(make_runner):
    row = RowSampling(PENALTIES, 0, vocab_size=3000, prompt_ids=range(5))
    for token in range(2000):
        row.append(token % 1500)
    counts = _counts(row)
    assert len(counts) == 1500
    assert (counts[0], counts[499], counts[500], counts[1499]) == (2, 2, 1, 1)


def test_results_without_log_probabilities_say_so(make_runner):
    runner = make_runner(20)
    result = runner.one(np.arange(20), SamplingParams(temperature=0))
    assert (result.token, result.rank, result.top, result.error) == (19, 0, [], None)
    assert math.isnan(result.logprob)


def test_a_step_keeps_nothing_of_the_step_before(make_runner):
    runner = make_runner(20)
    logits = np.arange(20)
    banned = SamplingParams(temperature=0, logit_bias={19: -100}, logprobs=3)
    assert runner.one(logits, banned).token == 18
    result = runner.one(logits, SamplingParams(temperature=0))
    assert (result.token, result.top) == (19, [])
