"""Prefix caching seen from outside: what is computed again, what is shared, and what keeps users apart."""

from __future__ import annotations

import pytest

from octavo.sampling.params import SamplingParams
from tests.engine.fakes import Answer, collect, expected_answer, greedy, make_engine, prompt_of, request, run


def test_a_full_hit_computes_only_the_last_token_of_the_prompt() -> None:
    engine, backend = make_engine()
    run(engine, [request("a", prompt_of(64), greedy(1))])
    backend.steps.clear()
    item = request("b", prompt_of(64), greedy(1))
    answer = run(engine, [item])["b", 0]
    assert answer.same_as(expected_answer(item))
    assert backend.steps == [1]
    assert answer.num_cached_tokens == 63


def test_a_partial_hit_computes_what_follows_the_last_full_block() -> None:
    engine, backend = make_engine()
    run(engine, [request("a", prompt_of(70), greedy(1))])
    backend.steps.clear()
    assert run(engine, [request("b", prompt_of(70), greedy(1))])["b", 0].num_cached_tokens == 64
    assert backend.steps == [6]


def test_an_answer_is_cached_too_for_the_next_turn() -> None:
    engine, backend = make_engine()
    first = request("a", prompt_of(20), greedy(30))
    answer = run(engine, [first])["a", 0]
    backend.steps.clear()
    turn = request("b", [*first.prompt_ids, *answer.tokens, 1, 2, 3], greedy(1))
    assert run(engine, [turn])["b", 0].num_cached_tokens == 48  # 49 of the 50 tokens were computed: three full blocks
    assert backend.steps == [5]


def test_without_prefix_caching_everything_is_computed() -> None:
    engine, backend = make_engine(enable_prefix_caching=False)
    for name in "ab":
        assert run(engine, [request(name, prompt_of(64), greedy(1))])[name, 0].num_cached_tokens == 0
    assert backend.steps == [64, 64]


@pytest.mark.parametrize("field", ["cache_salt", "adapter"])
def test_a_prefix_is_not_shared_across_salts_or_adapters(field: str) -> None:
    engine, _ = make_engine()
    hits = []
    for number, value in enumerate((None, "x", "y", "x", None)):
        name = f"r{number}"
        hits.append(run(engine, [request(name, prompt_of(64), **{field: value})])[name, 0].num_cached_tokens)
    assert hits == [0, 0, 0, 63, 63]


@pytest.mark.parametrize("budget", [40, 64, 2048])
@pytest.mark.parametrize("length", [64, 70])
def test_a_prefix_that_arrives_many_times_at_once_is_computed_once(budget: int, length: int) -> None:
    engine, backend = make_engine(200, max_num_batched_tokens=budget)
    items = [request(f"r{n}", [*prompt_of(length), n], greedy(3)) for n in range(20)]
    answers = run(engine, items)
    assert all(answers[item.request_id, 0].same_as(expected_answer(item)) for item in items)
    assert max(backend.computed.values()) == 1
    assert engine.counters.deferrals > 0


def test_an_unrelated_request_does_not_wait_for_a_prefix_others_wait_for() -> None:
    engine, _ = make_engine(200, max_num_batched_tokens=64)
    for number in range(10):
        engine.add(request(f"r{number}", [*prompt_of(100), number]))
    engine.add(request("other", prompt_of(10, 5)))
    names = {output.request_id for _ in range(2) for output in engine.step()}
    assert "other" in names


def test_those_that_wait_for_a_prefix_go_on_when_the_one_computing_it_is_aborted() -> None:
    engine, _ = make_engine(200, max_num_batched_tokens=32)
    items = [request(f"r{n}", [*prompt_of(100), n]) for n in range(5)]
    for item in items:
        engine.add(item)
    engine.step()
    engine.abort("r0")
    answers = run(engine)
    assert all(answers[item.request_id, 0].same_as(expected_answer(item)) for item in items[1:])


def test_equal_blocks_computed_at_the_same_time_become_one() -> None:
    engine, _ = make_engine(200)
    # A request that is scored does not wait for the prefix, it computes its own.
    engine.add(request("a", prompt_of(64), greedy(8, prompt_logprobs=0)))
    engine.add(request("b", prompt_of(64), greedy(8, prompt_logprobs=0)))
    engine.step()
    assert engine.counters.blocks_shared_late == 4
    assert engine.stats().referenced_blocks == 4
    assert engine.check() == []


def test_cached_prefixes_are_forgotten_on_request_but_not_under_a_running_sequence() -> None:
    engine, _ = make_engine()
    run(engine, [request("a", prompt_of(40))])
    engine.add(request("b", prompt_of(40, 1)))
    engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.check() == []
    run(engine)
    assert engine.reset_prefix_cache()
    assert run(engine, [request("c", prompt_of(40))])["c", 0].num_cached_tokens == 0


def test_siblings_that_come_back_in_one_step_never_copy_from_a_block_that_is_only_copied_to() -> None:
    engine, _ = make_engine(enable_prefix_caching=False)
    item = request("a", prompt_of(20), SamplingParams(n=4, seed=3, max_tokens=10))
    answers: dict[tuple[str, int], Answer] = {}
    engine.add(item)
    for _ in range(4):
        collect(engine.step(), answers)
    engine.finish("a", 0)
    sequences = engine._groups["a"].sequences
    for index in (1, 2):
        engine.scheduler._preempt(sequences[index])
    before = engine.counters.block_copies
    collect(engine.step(), answers)  # the back end refuses copies that depend on one another
    assert engine.counters.block_copies == before + 2
    while engine.has_work():
        collect(engine.step(), answers)
    assert all(answers["a", index].same_as(expected_answer(item, index)) for index in (1, 2, 3))


def test_the_beginning_of_a_prefix_outlives_its_end_under_memory_pressure() -> None:
    engine, _ = make_engine(8)
    run(engine, [request("a", prompt_of(96), greedy(1))])  # six blocks
    run(engine, [request("b", prompt_of(64, 1), greedy(1))])  # two free blocks and the last two of a
    assert run(engine, [request("c", prompt_of(96), greedy(1))])["c", 0].num_cached_tokens == 64


def test_a_preempted_sequence_finds_its_own_blocks_again_and_goes_on_where_it_was() -> None:
    engine, backend = make_engine(8, policy="priority")
    low = request("low", prompt_of(60), SamplingParams(seed=1, max_tokens=30), priority=1)
    engine.add(low)
    for _ in range(10):
        engine.step()
    before = sum(backend.steps)
    high = request("high", prompt_of(70, 1), greedy(4), priority=0)
    answers = run(engine, [high])
    assert engine.counters.preemptions == 1
    assert answers["low", 0].tokens == expected_answer(low).tokens[10:]
    # Of its four full blocks only the last was evicted: of 69 computed tokens 21 are computed again.
    assert sum(backend.steps) - before == 73 + 21 + 20
