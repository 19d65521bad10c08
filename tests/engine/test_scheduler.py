"""The scheduler: order, budget, memory, preemption, and that nobody waits without bound."""

from __future__ import annotations

import pytest

from octavo.engine.core import Engine
from tests.engine.fakes import expected_answer, greedy, make_engine, prompt_of, request, run


def finish_order(engine: Engine) -> list[str]:
    order = []
    while engine.has_work():
        order += [output.request_id for output in engine.step() if output.finished]
        assert engine.check() == []
    return order


def first_token_steps(engine: Engine, steps: int) -> dict[str, int]:
    seen: dict[str, int] = {}
    for step in range(1, steps + 1):
        for output in engine.step():
            seen.setdefault(output.request_id, step)
    return seen


def test_a_step_never_computes_more_tokens_or_sequences_than_allowed_and_fills_its_budget() -> None:
    engine, backend = make_engine(200, max_num_batched_tokens=50, max_num_seqs=6)
    run(engine, [request(f"r{n}", prompt_of(90, n), greedy(10)) for n in range(12)])  # the back end checks the limits
    assert backend.steps[:10] == [50] * 10


def test_decodes_go_on_in_every_step_while_a_long_prompt_is_computed() -> None:
    engine, _ = make_engine(200, max_num_batched_tokens=20)
    engine.add(request("short", prompt_of(4), greedy(30)))
    engine.step()
    engine.add(request("long", prompt_of(300, 1), greedy(5)))
    for _ in range(15):
        assert [output.request_id for output in engine.step()] == ["short"]


def test_a_short_prompt_behind_long_ones_starts_at_once() -> None:
    engine, _ = make_engine(2000, max_num_batched_tokens=256, max_model_len=4096)
    for number in range(2):
        engine.add(request(f"long{number}", prompt_of(3000, number)))
    engine.step()
    engine.add(request("short", prompt_of(10, 9)))
    assert first_token_steps(engine, 2) == {"short": 1}


def test_fcfs_admits_by_arrival() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for number, length in enumerate((30, 5, 20)):
        engine.add(request(f"r{number}", prompt_of(length, number)))
    assert finish_order(engine) == ["r0", "r1", "r2"]


def test_priority_admits_lower_numbers_first_and_ties_by_arrival() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="priority")
    for number, priority in enumerate((5, 0, -2, 5, 0)):
        engine.add(request(f"r{number}", prompt_of(9, number), priority=priority))
    assert finish_order(engine) == ["r2", "r1", "r4", "r0", "r3"]


def test_priority_preempts_lower_ones_when_memory_is_needed() -> None:
    engine, _ = make_engine(6, policy="priority")
    low = request("low", prompt_of(60), greedy(30), priority=1)
    engine.add(low)
    engine.step()
    engine.add(request("high", prompt_of(60, 1), greedy(4), priority=0))
    answers = run(engine)
    assert engine.counters.preemptions == 1
    assert answers["low", 0].tokens == expected_answer(low).tokens[1:]


def test_priority_preempts_nobody_when_there_is_memory() -> None:
    engine, _ = make_engine(60, policy="priority")
    engine.add(request("low", prompt_of(60), greedy(30), priority=1))
    engine.step()
    engine.add(request("high", prompt_of(60, 1), greedy(4), priority=0))
    assert {output.request_id for output in engine.step()} == {"low", "high"}
    assert engine.counters.preemptions == 0


def test_priority_does_not_preempt_equals_nor_in_vain() -> None:
    engine, _ = make_engine(8, policy="priority")
    engine.add(request("equal", prompt_of(60), greedy(30), priority=0))
    engine.add(request("low", prompt_of(16, 2), greedy(10), priority=1))
    engine.step()
    # Five blocks are wanted: even without "low" there are fewer than that.
    engine.add(request("high", prompt_of(80, 1), greedy(4), priority=0))
    for _ in range(5):
        engine.step()
    assert engine.counters.preemptions == 0
    run(engine)


def test_priority_does_not_count_blocks_the_newcomer_would_share_as_memory_to_be_gained() -> None:
    engine, _ = make_engine(8, policy="priority")
    engine.add(request("equal", prompt_of(20, 1), greedy(12), priority=0))
    engine.add(request("low", prompt_of(66), greedy(12), priority=1))
    engine.step()
    engine.add(request("high", prompt_of(64) + prompt_of(40, 2), greedy(4), priority=0))  # needs three, shares four
    for _ in range(5):
        engine.step()
    assert engine.counters.preemptions == 0
    run(engine)


def test_a_full_pool_does_not_spend_its_steps_on_recomputation() -> None:
    engine, _ = make_engine(80, enable_prefix_caching=False)
    needed = 0
    for number in range(40):
        prompt, answer = 10 + number * 37 % 70, 20 + number * 53 % 90
        needed += prompt + answer - 1
        engine.add(request(f"r{number}", prompt_of(prompt, number), greedy(answer)))
    run(engine, check=False)
    assert engine.counters.computed_tokens < 1.1 * needed


def test_shortest_admits_by_the_length_no_cached_prefix_covers() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="shortest")
    run(engine, [request("warm", prompt_of(64), greedy(1))])
    engine.add(request("first", prompt_of(7, 8), greedy(2)))
    engine.step()
    engine.add(request("long", prompt_of(30, 1), greedy(2)))
    engine.add(request("medium", prompt_of(12, 2), greedy(2)))
    engine.add(request("cached", [*prompt_of(64), 1, 2], greedy(2)))
    assert finish_order(engine) == ["first", "cached", "medium", "long"]


@pytest.mark.parametrize("bound", [1, 5])
def test_shortest_lets_a_long_request_be_overtaken_only_so_often(bound: int) -> None:
    engine, _ = make_engine(200, max_num_seqs=1, policy="shortest", starvation_bound=bound)
    engine.add(request("first", prompt_of(3), greedy(1)))
    engine.add(request("long", prompt_of(100, 1), greedy(1)))
    order = []
    for number in range(30):
        engine.add(request(f"s{number}", prompt_of(3, number), greedy(1)))
        order += [output.request_id for output in engine.step() if output.finished]
    assert order.index("long") == bound


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest", "fair"])
@pytest.mark.parametrize("capacity", ["max_utilization", "no_evict"])
def test_a_request_that_fits_only_alone_runs_without_starving_others(policy: str, capacity: str) -> None:
    engine, _ = make_engine(8, policy=policy, capacity=capacity, starvation_bound=6)
    names = [f"s{number}" for number in range(3)]
    for number, name in enumerate(names):
        engine.add(request(name, prompt_of(10, number), greedy(12)))
    engine.step()
    engine.add(request("whole", prompt_of(120, 9), greedy(9)))
    order: list[str] = []
    for number in range(3, 60):
        engine.add(request(f"s{number}", prompt_of(10, number), greedy(12)))
        for _ in range(3):
            order += [output.request_id for output in engine.step() if output.finished]
            assert engine.check() == []
    order += finish_order(engine)
    # Some overtake it while it waits, but a bounded number, and all of them end.
    assert 3 <= order.index("whole") <= 3 + 2 * 6
    assert len(order) == 61


def test_the_youngest_is_preempted_and_comes_back_to_its_place() -> None:
    engine, _ = make_engine(7, enable_prefix_caching=False)
    for number in range(3):
        engine.add(request(f"r{number}", prompt_of(20, number), greedy(60)))
    engine.add(request("later", prompt_of(20, 7), greedy(2)))
    assert [name for name in finish_order(engine) if name != "later"] == ["r0", "r1", "r2"]
    assert engine.counters.preemptions > 0


def test_no_evict_admits_only_what_fits_to_its_last_token() -> None:
    engine, _ = make_engine(7, capacity="no_evict")
    for number in range(3):
        engine.add(request(f"r{number}", prompt_of(20, number), greedy(25)))  # three blocks each
    engine.step()
    assert engine.stats().running == 2
    run(engine)
    assert engine.counters.preemptions == 0


def test_max_utilization_runs_more_at_once_than_no_evict() -> None:
    most = {}
    for capacity in ("no_evict", "max_utilization"):
        engine, _ = make_engine(24, capacity=capacity)
        for number in range(8):
            engine.add(request(f"r{number}", prompt_of(20, number), greedy(100, stop_token_ids=list(range(40)))))
        engine.step()
        most[capacity] = engine.stats().running
        run(engine)
    assert most["max_utilization"] > most["no_evict"]


def test_more_running_sequences_than_budget_are_not_admitted() -> None:
    engine, backend = make_engine(100, max_num_batched_tokens=4, max_num_seqs=32)
    run(engine, [request(f"r{number}", prompt_of(3, number), greedy(10)) for number in range(12)])
    assert max(backend.steps) <= 4


def test_the_answers_of_a_request_with_more_sequences_than_places_all_come() -> None:
    from octavo.sampling.params import SamplingParams

    for caching in (True, False):
        engine, _ = make_engine(40, max_num_seqs=3, enable_prefix_caching=caching)
        item = request("a", prompt_of(37), SamplingParams(n=10, seed=2, max_tokens=9))
        answers = run(engine, [item])
        assert all(answers["a", index].same_as(expected_answer(item, index)) for index in range(10))
