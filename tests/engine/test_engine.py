"""Whole runs of the engine over a simulated KV cache: same answers whatever the load, nothing left behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.request import EngineRequest
from octavo.sampling.params import SamplingParams
from tests.engine.fakes import (
    VOCAB,
    Answer,
    collect,
    expected_answer,
    expected_scores,
    greedy,
    make_engine,
    prompt_of,
    request,
    run,
)

POLICIES = ("fcfs", "priority", "shortest", "fair")
CAPACITIES = ("max_utilization", "no_evict")


def mixed_requests(seed: int, count: int, *, longest: int = 90, policy: str = "fcfs") -> list[EngineRequest]:
    """Greedy and seeded, one answer and several, shared and own prefixes, stop tokens, prompt log-probabilities."""
    rng = random.Random(seed)
    shared = [prompt_of(48, salt) for salt in range(3)]
    requests = []
    for number in range(count):
        prompt = prompt_of(rng.randint(1, longest - 48), rng.randint(0, 5))
        if rng.random() < 0.6:
            prompt = rng.choice(shared)[: rng.choice((16, 20, 32, 48))] + prompt[: rng.randint(0, longest - 48)]
        n = rng.choice((1, 1, 1, 2, 3))
        params = SamplingParams(
            n=n,
            temperature=1.0 if n > 1 else rng.choice((0.0, 0.8)),
            seed=rng.choice((0, 1, 2)),
            max_tokens=rng.choice((1, 2, 7, 16, 17, 40)),
            stop_token_ids=[rng.randrange(VOCAB)],
            ignore_eos=rng.random() < 0.3,
            prompt_logprobs=rng.choice((None, None, None, 0)),
        )
        priority = rng.randint(-1, 1) if policy == "priority" else 0
        tenant = rng.choice((None, "a", "b")) if policy == "fair" else None
        requests.append(request(f"r{number}", prompt, params, eos_ids=(3, 4), priority=priority, tenant=tenant))
    return requests


def assert_expected(answers: dict[tuple[str, int], Answer], requests: list[EngineRequest]) -> None:
    assert len(answers) == sum(item.params.num_sequences for item in requests)
    for item in requests:
        for index in range(item.params.num_sequences):
            answer = answers[item.request_id, index]
            assert answer.same_as(expected_answer(item, index)), (item.request_id, index)
            wanted = expected_scores(item) if item.params.prompt_logprobs is not None and index == 0 else None
            assert answer.prompt_logprobs == wanted


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 400},
        {"num_blocks": 400, "enable_prefix_caching": False},
        {"num_blocks": 9},
        {"num_blocks": 9, "enable_prefix_caching": False},
        {"num_blocks": 12, "max_num_batched_tokens": 16},
        {"num_blocks": 400, "max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"num_blocks": 30, "max_num_seqs": 5},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_policy_memory_budget_or_cache(policy: str, capacity: str, settings: dict) -> None:
    requests = mixed_requests(1, 24, policy=policy)
    engine, _ = make_engine(policy=policy, capacity=capacity, **settings)
    assert_expected(run(engine, requests), requests)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.referenced_blocks, stats.reserved_blocks) == (0, 0, 0, 0)
    if capacity == "no_evict":
        assert stats.counters.preemptions == 0


def test_answers_are_the_same_again_with_a_warm_cache_and_in_another_order() -> None:
    requests = mixed_requests(2, 24)
    engine, backend = make_engine(num_blocks=400)
    run(engine, requests)
    cold = sum(backend.steps)
    backend.steps.clear()
    random.Random(0).shuffle(requests)
    assert_expected(run(engine, requests), requests)
    assert sum(backend.steps) < cold


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    num_blocks=st.integers(9, 40),
    budget=st.integers(1, 80),
    seqs=st.integers(1, 12),
    policy=st.sampled_from(POLICIES),
    capacity=st.sampled_from(CAPACITIES),
    caching=st.booleans(),
    arrivals=st.integers(1, 6),
)
def test_any_configuration_gives_every_request_its_own_answer(
    seed: int,
    num_blocks: int,
    budget: int,
    seqs: int,
    policy: str,
    capacity: str,
    caching: bool,
    arrivals: int,
) -> None:
    engine, _ = make_engine(
        num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        policy=policy,
        capacity=capacity,
        enable_prefix_caching=caching,
        starvation_bound=3,
    )
    requests = mixed_requests(seed, 10, policy=policy)
    answers: dict[tuple[str, int], Answer] = {}
    for position, item in enumerate(requests):
        engine.add(item)
        if position % arrivals == 0:
            collect(engine.step(), answers)
            assert engine.check() == []
    while engine.has_work():
        collect(engine.step(), answers)
        assert engine.check() == []
    assert_expected(answers, requests)


@pytest.mark.parametrize(
    ("policy", "capacity"), [("priority", "max_utilization"), ("shortest", "no_evict"), ("fair", "max_utilization")]
)
def test_ten_thousand_random_operations_leave_no_block_behind(policy: str, capacity: str) -> None:
    rng = random.Random(9)
    engine, _ = make_engine(24, max_num_batched_tokens=48, max_num_seqs=8, policy=policy, capacity=capacity)
    live: dict[str, EngineRequest] = {}
    everything: dict[str, EngineRequest] = {}
    answers: dict[tuple[str, int], Answer] = {}
    stock = mixed_requests(3, 200, policy=policy)
    for number in range(10_000):
        operation = rng.random()
        if operation < 0.35 and len(live) < 12:
            source = rng.choice(stock)
            item = replace(source, request_id=f"q{number}")
            engine.add(item)
            live[item.request_id] = everything[item.request_id] = item
        elif operation < 0.42 and live:
            name = rng.choice(list(live))
            for output in engine.abort(name):
                assert output.finish_reason == "abort"
            del live[name]
        elif operation < 0.5 and live:
            name = rng.choice(list(live))
            if engine.finish(name, rng.randrange(live[name].params.num_sequences)) and not any(
                seq_name == name for seq_name in engine._groups
            ):
                del live[name]
        else:
            collect(engine.step(), answers)
            for name in [name for name in live if name not in engine._groups]:
                del live[name]
        if number % 20 == 0:
            assert engine.check() == []
    for name in list(live):
        engine.abort(name)
    assert engine.check() == []
    stats = engine.stats()
    assert not engine.has_work()
    assert (stats.running, stats.waiting, stats.referenced_blocks, stats.reserved_blocks) == (0, 0, 0, 0)
    assert stats.cached_blocks + stats.free_blocks == 24
    assert engine.reset_prefix_cache()
    assert engine.stats().free_blocks == 24
    assert stats.counters.finished["abort"] > 100
    for (name, index), answer in answers.items():
        wanted = expected_answer(everything[name], index)
        assert answer.tokens == wanted.tokens[: len(answer.tokens)]
        assert answer.finish_reason is None or answer.same_as(wanted)


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_of_a_few_blocks_finishes_everything_that_can_fit(caching: bool) -> None:
    engine, _ = make_engine(3, max_num_seqs=8, enable_prefix_caching=caching)
    requests = [request(f"r{n}", prompt_of(1 + n * 5 % 32, n % 4), greedy(49 - (1 + n * 5 % 32))) for n in range(20)]
    assert_expected(run(engine, requests), requests)


def test_a_request_that_needs_exactly_the_whole_pool_runs_with_and_without_its_prefix_cached() -> None:
    engine, _ = make_engine(4)
    item = request("a", prompt_of(64), greedy(1))
    for name in "abc":
        assert_expected(
            run(engine, [request(name, item.prompt_ids, item.params)]), [request(name, item.prompt_ids, item.params)]
        )


def test_the_waste_of_a_mixed_load_is_below_four_percent() -> None:
    rng = random.Random(4)
    engine, _ = make_engine(2000, max_num_batched_tokens=512, max_model_len=2048)
    for number in range(60):
        prompt = prompt_of(max(8, min(1200, int(rng.lognormvariate(5.4, 0.8)))), number)
        engine.add(request(f"r{number}", prompt, greedy(max(8, min(500, int(rng.lognormvariate(5.0, 0.7)))))))
    allocated = used = 0
    engine.backend.execute = _quick(engine.backend)  # type: ignore[method-assign]
    while engine.has_work():
        engine.step()
        stats = engine.stats()
        allocated += stats.allocated_slots
        used += stats.used_slots
    assert 1 - used / allocated < 0.04


def _quick(backend):  # type: ignore[no-untyped-def]
    """Sampling alone: the load above is too long to check every position read."""
    from octavo.backends.interface import SampledToken, StepOutput

    def execute(batch):  # type: ignore[no-untyped-def]
        return StepOutput([SampledToken(1, 0.0, 1, []) if item.sample else None for item in batch.work])

    return execute
