"""The native sampler gives the same bits wherever and beside whatever a row is sampled, and survives wrong records."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from octavo import _native
from octavo.sampling import reference
from octavo.sampling.params import SamplingParams

MANY_PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logprobs=4),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, logprobs=1),
    SamplingParams(top_k=40, top_p=0.9, logprobs=2),
    SamplingParams(top_p=0.95, temperature=1.4),
    SamplingParams(min_p=0.05, typical_p=0.9, logprobs=0),
    SamplingParams(repetition_penalty=1.2, logit_bias={3: 5.0}, frequency_penalty=0.3, logprobs=3),
    SamplingParams(allowed_token_ids=[1, 5, 900, 901], logprobs=1),
]
MORE_PARAMS = [
    *MANY_PARAMS,
    SamplingParams(watermark=True, logprobs=2),
    SamplingParams(watermark=True, watermark_gamma=0.25, temperature=0.7, top_p=0.9),
    SamplingParams(logprobs=3, logprobs_mode="processed", temperature=0.8, typical_p=0.7),
    SamplingParams(logprobs=3, logprobs_mode="processed", temperature=0, frequency_penalty=1.0),
    SamplingParams(logprobs=70, logprobs_mode="processed", top_k=60, watermark=True),
]


def _bits(result) -> tuple:
    pairs = tuple((token, np.float32(value).tobytes()) for token, value in result.top)
    return result.token, np.float32(result.logprob).tobytes(), result.rank, pairs


@pytest.fixture
def work(make_runner):
    """A runner and, for each of the parameters, logits, a row and a position."""
    rng = np.random.default_rng(1)
    runner = make_runner(1500, max_rows=16, workers=2)
    rows = [
        runner.row(params, seed=90 + i, index=i % 3, prompt_ids=[1, 2, 3], output_ids=[7, 7, 8])
        for i, params in enumerate(MORE_PARAMS)
    ]
    logits = (rng.standard_normal((len(rows), 1500)) * 4).astype(np.float32)
    return runner, rows, logits


def _run(runner, logits, rows, order):
    runner.batch.begin()
    for place, i in enumerate(order):
        runner.batch.fill(place, rows[i], 100 + i)
    runner.sampler.sample(np.ascontiguousarray(logits[list(order)]), len(order))
    return {i: _bits(runner.batch.result(place)) for place, i in enumerate(order)}


def test_a_row_is_the_same_at_every_index_and_beside_any_other_row(work):
    runner, rows, logits = work
    alone = {i: _run(runner, logits, rows, [i])[i] for i in range(len(rows))}
    rng = np.random.default_rng(2)
    for _ in range(20):
        order = rng.permutation(len(rows))[: rng.integers(1, len(rows) + 1)].tolist()
        for i, bits in _run(runner, logits, rows, order).items():
            assert bits == alone[i]


def test_workers_at_the_same_time_give_what_one_after_another_gives(work):
    runner, rows, logits = work
    serial = _run(runner, logits, rows, range(len(rows)))
    for _ in range(10):
        runner.batch.begin()
        for i, row in enumerate(rows):
            runner.batch.fill(i, row, 100 + i)

        def half(worker: int) -> None:
            for i in range(worker, len(rows), 2):
                runner.sampler.sample_row(i, logits[i].copy(), worker)

        threads = [threading.Thread(target=half, args=(worker,)) for worker in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {i: _bits(runner.batch.result(i)) for i in range(len(rows))} == serial


def test_results_do_not_depend_on_what_the_scratch_held(work, make_runner):
    runner, rows, logits = work
    first = _run(runner, logits, rows, range(len(rows)))
    noise = np.random.default_rng(3).standard_normal(1500)
    for params in MORE_PARAMS:
        runner.one(noise, params, seed=5)
    assert _run(runner, logits, rows, range(len(rows))) == first


def test_the_arithmetic_is_the_same_on_every_machine(make_runner_of_level):
    # Logits from integers only; the expected bits were computed once and hold for every CPU and compiler.
    ids = np.arange(2000, dtype=np.int64)
    logits = ((ids * 7919 % 2003) / 128.0).astype(np.float32)
    runner = make_runner_of_level(2000, max_rows=16)
    found = []
    for params in MANY_PARAMS:
        row = runner.row(params, seed=12345, prompt_ids=[1, 2, 3], output_ids=[7, 7, 8])
        for result in runner.many(logits, [(row, 9), (row, 10)]):
            logprob = None if math.isnan(result.logprob) else result.logprob.hex()
            found.append((result.token, logprob, result.rank))
    assert found == EXPECTED


EXPECTED: list[tuple[int, str | None, int]] = [
    (280, None, 0),
    (280, None, 0),
    (280, "-0x1.36c79e0000000p+2", 1),
    (280, "-0x1.36c79e0000000p+2", 1),
    (1077, None, 0),
    (991, None, 0),
    (1077, "-0x1.3bc79e0000000p+2", 11),
    (991, "-0x1.42c79e0000000p+2", 25),
    (1077, "-0x1.3bc79e0000000p+2", 11),
    (991, "-0x1.42c79e0000000p+2", 25),
    (1077, None, 0),
    (992, None, 0),
    (1077, "-0x1.3bc79e0000000p+2", 11),
    (991, "-0x1.42c79e0000000p+2", 25),
    (1077, "-0x1.3bc79e0000000p+2", 11),
    (991, "-0x1.42c79e0000000p+2", 25),
    (1, "-0x1.64c79e0000000p+2", 93),
    (1, "-0x1.64c79e0000000p+2", 93),
]


@pytest.mark.parametrize("vocab", [1, 15, 64, 100, 1000, 1500])
def test_every_level_computes_the_same_bits(make_runner, vocab):
    rng = np.random.default_rng(vocab)
    runners = [make_runner(vocab, level=level) for level in _native.available_levels()]
    for params in MORE_PARAMS:
        if params.logit_bias or params.allowed_token_ids:
            params = params.clone(logit_bias={0: 5.0}, allowed_token_ids=[0, vocab // 2, vocab - 1])
        for scale in (0.0, 0.5, 5.0, 100.0):
            logits = rng.standard_normal(vocab) * scale
            first, *others = (_bits(r.one(logits, params, 3, prompt_ids=[0], output_ids=[vocab - 1])) for r in runners)
            assert all(other == first for other in others)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="none"):
        _native.Sampler(10, 1, 10, 1, "none")


def test_seed_sample_index_and_position_each_change_the_draw(make_runner):
    runner = make_runner(1000, max_rows=8)
    params = SamplingParams(temperature=1.0)
    rows = [runner.row(params, seed, index) for seed, index in ((0, 0), (1, 0), (1 << 32, 0), (-2, 0), (0, 1))]
    results = runner.many(np.zeros(1000), [(row, 5) for row in rows] + [(rows[0], 6), (rows[0], 5 + (1 << 32))])
    tokens = [result.token for result in results]
    assert len(set(tokens)) == len(tokens)
    again = runner.many(np.zeros(1000), [(rows[0], 5)])
    assert again[0].token == tokens[0]


def test_philox_gives_the_published_vectors():
    ones = 0xFFFFFFFF
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in vectors:
        assert _native.philox4x32(counter, key) == expected
        assert reference.philox4x32(counter, key) == expected


def test_the_exponential_is_within_two_ulp_and_zero_far_below(level):
    x = np.linspace(-87.0, 0.0, 400_001, dtype=np.float32)
    out = np.empty_like(x)
    _native.sampler_exp(level, x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / np.spacing(exact.astype(np.float32)).astype(np.float64)) < 2.0
    assert out[-1] == 1.0
    far = np.array([-87.5, -1000.0, -np.inf, -3.4e38], np.float32)
    _native.sampler_exp(level, far, out[:4])
    assert out[:4].tolist() == [0.0] * 4


def test_the_logarithm_is_that_of_the_standard_library():
    for x in [1.0, 1.0 + 2**-52, 2.0, math.sqrt(2.0), 49152.0, 1e-30, *np.geomspace(1e-10, 1e10, 1001).tolist()]:
        assert _native.sampler_log(x) == pytest.approx(math.log(x), rel=4e-16, abs=2e-16)


def test_wrong_records_fail_their_row_and_touch_nothing_else(make_runner):
    rng = np.random.default_rng(4)
    vocab = 200
    runner = make_runner(vocab, max_rows=8)
    row = runner.row(SamplingParams(logprobs=2, logit_bias={1: 1.0}, presence_penalty=0.5), output_ids=[4, 5])
    logits = rng.standard_normal((8, vocab)).astype(np.float32)
    expected = None
    for trial in range(3000):
        runner.batch.begin()
        for i in range(8):
            runner.batch.fill(i, row, 3)
        if trial:
            words = runner.sampler.records.view(np.int32)
            for i in range(1, 8):
                for _ in range(rng.integers(1, 4)):
                    wild = rng.integers(-(1 << 31), 1 << 31) if rng.random() < 0.5 else rng.integers(-10, 300)
                    words[i, rng.integers(4, 26)] = wild
        runner.sampler.sample(logits.copy(), 8)
        found = _bits(runner.batch.result(0))[:3]  # a wrong place in the pool may be another row's
        expected = expected or found
        assert found == expected
        assert set(runner.sampler.statuses.tolist()) <= {0, 1, 2, 3}
        tokens = runner.sampler.tokens
        assert np.all((tokens >= -1) & (tokens < vocab))


def test_ids_outside_the_vocabulary_in_a_list_fail_the_row(make_runner):
    for wrong in (-1, 100, 1 << 30):
        runner = make_runner(100)
        row = runner.row(SamplingParams(temperature=0, allowed_token_ids=[5]))
        row._allowed = np.array([wrong], np.int32)
        result = runner.many(np.zeros(100), [(row, 0)])[0]
        assert result.error is not None
        assert result.token == -1


def test_lists_without_pools_fail_the_row():
    sampler = _native.Sampler(10, 1, 10, 1)
    record = sampler.records.view(np.int32)
    record[0, 5] = 1  # greedy
    record[0, 18] = 1  # one bias
    sampler.sample(np.zeros((1, 10), np.float32), 1)
    assert sampler.statuses[0] == 3


def test_arrays_of_a_sampler_outlive_it():
    sampler = _native.Sampler(10, 3, 10, 1)
    tokens = sampler.tokens
    tokens[:] = [1, 2, 3]
    del sampler
    assert tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "sizes", [(0, 1, 0, 1), (10, 0, 0, 1), (10, 1, 11, 1), (10, 1, -1, 1), (10, 1, 1, 0), (1 << 40, 1, 1, 1)]
)
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="Sampler"):
        _native.Sampler(*sizes)


def test_arrays_of_the_wrong_shape_are_refused(make_runner):
    sampler = make_runner(10).sampler
    with pytest.raises(ValueError, match="sample"):
        sampler.sample(np.zeros((2, 10), np.float32), 3)
    with pytest.raises(ValueError, match="sample"):
        sampler.sample(np.zeros((2, 11), np.float32), 2)
    with pytest.raises(ValueError, match="sample_row"):
        sampler.sample_row(99, np.zeros(10, np.float32), 0)
    with pytest.raises(ValueError, match="set_pools"):
        sampler.set_pools(np.zeros(1, np.int32), np.zeros(2, np.int32), np.zeros(3, np.float32))
