"""Requests paused out of the batch: what they give up, what they keep, and the same tokens after they are resumed."""

from __future__ import annotations

import pytest

from octavo.sampling.params import SamplingParams
from tests.engine.fakes import (
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


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_pause_changes_no_token_whenever_it_begins(steps: int, caching: bool, n: int) -> None:
    engine, _ = make_engine(max_num_batched_tokens=32, max_num_seqs=3, enable_prefix_caching=caching)
    params = SamplingParams(n=n, seed=1, max_tokens=20, prompt_logprobs=0)
    items = [request(name, prompt_of(40, salt), params) for salt, name in enumerate("abc")]
    answers: dict[tuple[str, int], Answer] = {}
    for item in items:
        engine.add(item)
    for _ in range(steps):
        collect(engine.step(), answers)
    assert engine.pause("a")
    assert engine.check() == []
    seen = {key: len(answer.tokens) for key, answer in answers.items()}
    for _ in range(4):
        collect(engine.step(), answers)
    assert all(len(answers[key].tokens) == count for key, count in seen.items() if key[0] == "a")
    assert engine.resume("a")
    assert engine.check() == []
    while engine.has_work():
        collect(engine.step(), answers)
    assert all(
        answers[item.request_id, index].same_as(expected_answer(item, index)) for item in items for index in range(n)
    )
    assert all(answers[item.request_id, 0].prompt_logprobs == expected_scores(item) for item in items)


def test_a_paused_request_holds_no_block_and_finds_its_full_ones_again() -> None:
    engine, backend = make_engine()
    engine.add(request("a", prompt_of(40), greedy(30)))
    for _ in range(10):
        engine.step()
    assert engine.pause("a")
    stats = engine.stats()
    assert (stats.referenced_blocks, stats.reserved_blocks, stats.cached_blocks) == (0, 0, 3)
    backend.steps.clear()
    engine.resume("a")
    engine.step()
    assert backend.steps == [2]  # 50 tokens are known, 48 of them in full blocks
    run(engine)


def test_the_blocks_of_a_paused_request_go_to_others() -> None:
    engine, _ = make_engine(4)
    first = request("a", prompt_of(30), greedy(20))
    engine.add(first)
    answers: dict[tuple[str, int], Answer] = {}
    collect(engine.step(), answers)
    engine.pause("a")
    second = request("b", prompt_of(60, 1), greedy(4))
    assert run(engine, [second])["b", 0].same_as(expected_answer(second))
    engine.resume("a")
    while engine.has_work():
        collect(engine.step(), answers)
    assert answers["a", 0].same_as(expected_answer(first))
    assert engine.counters.preemptions == 0


def test_there_is_no_work_when_only_paused_requests_are_left() -> None:
    engine, backend = make_engine()
    for name in "ab":
        engine.add(request(name, prompt_of(20), SamplingParams(n=2, seed=1, max_tokens=5)))
    engine.step()
    for name in "ab":
        assert engine.has_work()
        engine.pause(name)
    assert not engine.has_work()
    done = len(backend.steps)
    assert engine.step() == []
    assert len(backend.steps) == done
    engine.resume("b")
    assert engine.has_work()
    assert {name for name, _ in run(engine)} == {"b"}


def test_only_a_running_or_waiting_request_can_be_paused_and_only_a_paused_one_resumed() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    assert not engine.pause("a")
    assert not engine.resume("a")
    for name in "ab":
        engine.add(request(name, prompt_of(20)))
    engine.step()
    for name in "ab":
        assert not engine.resume(name)
        assert engine.pause(name)
        assert not engine.pause(name)
        assert engine.resume(name)
    run(engine)
    assert not engine.pause("a")
    assert not engine.resume("a")
    assert engine.counters.pauses == 2


def test_statistics_count_the_sequences_of_paused_requests() -> None:
    engine, _ = make_engine(max_num_seqs=2)
    engine.add(request("a", prompt_of(20), SamplingParams(n=3, seed=1, max_tokens=9)))
    engine.add(request("b", prompt_of(20, 1)))
    engine.step()
    engine.pause("a")
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.paused) == (1, 0, 3)
    engine.finish("a", 1)
    assert engine.stats().paused == 2
    engine.resume("a")
    engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.paused) == (2, 1, 0)


def test_a_paused_request_keeps_its_place_in_the_order() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for number, name in enumerate("abcd"):
        engine.add(request(name, prompt_of(20, number), greedy(3)))
    engine.pause("b")
    engine.step()
    engine.resume("b")
    order = []
    while engine.has_work():
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["a", "b", "c", "d"]


def test_a_paused_request_can_be_aborted_and_its_sequences_ended() -> None:
    engine, _ = make_engine()
    params = SamplingParams(n=3, seed=1, max_tokens=9)
    engine.add(request("a", prompt_of(20), params))
    engine.step()
    engine.step()
    engine.pause("a")
    assert engine.finish("a", 1)
    assert engine.check() == []
    assert [(output.index, output.finish_reason) for output in engine.abort("a")] == [(0, "abort"), (2, "abort")]
    assert engine.check() == []
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.paused, stats.referenced_blocks) == (0, 0, 0, 0)
    assert not engine.has_work()
    engine.add(request("a", prompt_of(20), params))
    assert len(run(engine)) == 3


def test_the_others_stay_paused_when_the_first_sequence_of_a_paused_request_ends() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    item = request("a", prompt_of(20), SamplingParams(n=3, seed=1, max_tokens=5))
    engine.add(item)
    engine.step()
    engine.pause("a")
    assert engine.finish("a", 0)
    assert engine.check() == []
    assert not engine.has_work()
    engine.resume("a")
    answers = run(engine)
    assert all(answers["a", index].same_as(expected_answer(item, index)) for index in (1, 2))


def test_nobody_waits_for_the_prefix_a_paused_request_was_computing() -> None:
    engine, _ = make_engine(max_num_batched_tokens=20)
    engine.add(request("a", prompt_of(64), greedy(3)))
    engine.add(request("b", prompt_of(64), greedy(3)))
    engine.step()
    engine.step()
    assert engine.counters.deferrals > 0
    engine.pause("a")
    deferrals = engine.counters.deferrals
    assert run(engine)["b", 0].tokens == expected_answer(request("b", prompt_of(64), greedy(3))).tokens
    assert engine.counters.deferrals == deferrals


def test_a_paused_request_that_did_not_fit_holds_up_nobody() -> None:
    engine, _ = make_engine(8, starvation_bound=1)
    engine.add(request("small", prompt_of(10), greedy(100)))
    engine.step()
    engine.add(request("whole", prompt_of(120, 9), greedy(9)))
    engine.step()
    engine.pause("whole")
    for number in range(3):
        assert len(run(engine, [request(f"s{number}", prompt_of(10, number), greedy(2))], steps=100)) >= 1
    engine.resume("whole")
    assert run(engine)["whole", 0].finish_reason == "length"


def test_admissions_during_a_pause_do_not_count_as_overtaking() -> None:
    engine, _ = make_engine(200, max_num_seqs=1, policy="shortest", starvation_bound=4)
    engine.add(request("first", prompt_of(3), greedy(1)))
    engine.add(request("long", prompt_of(100, 1), greedy(1)))
    order: list[str] = []

    def feed(names: range) -> None:
        for number in names:
            engine.add(request(f"s{number}", prompt_of(3, number), greedy(1)))
            order.extend(output.request_id for output in engine.step() if output.finished)

    feed(range(2))
    engine.pause("long")
    feed(range(2, 12))
    engine.resume("long")
    feed(range(12, 30))
    assert order.index("long") == 4 + 10


def test_a_request_that_does_not_fit_goes_on_counting_who_overtakes_it_after_a_pause() -> None:
    engine, _ = make_engine(8, starvation_bound=4)
    engine.add(request("running", prompt_of(10), greedy(110)))
    engine.step()
    engine.add(request("whole", prompt_of(120, 9), greedy(9)))
    order: list[str] = []

    def feed(names: range) -> None:
        for number in names:
            engine.add(request(f"s{number}", prompt_of(3, number), greedy(1)))
            order.extend(output.request_id for output in engine.step() if output.finished)

    feed(range(2))
    engine.pause("whole")
    feed(range(2, 12))
    assert len(order) == 12
    engine.resume("whole")
    feed(range(12, 30))
    assert len(order) == 12 + 2
    run(engine)


def test_sequences_let_go_during_a_pause_begin_to_wait_when_it_ends() -> None:
    engine, _ = make_engine(policy="shortest")
    engine.add(request("a", prompt_of(20), SamplingParams(n=2, seed=1, max_tokens=5)))
    engine.pause("a")
    for number in range(3):
        run(engine, [request(f"s{number}", prompt_of(3, number))])
    engine.finish("a", 0)
    engine.resume("a")
    assert [seq.queued_at for seq in engine.scheduler.waiting] == [engine.counters.admissions]
    run(engine)


def test_a_paused_request_is_said_to_start_when_it_first_runs() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt_of(20)))
    engine.add(request("b", prompt_of(20, 1)))
    engine.pause("a")
    engine.step()
    assert engine.started == ["b"]
    taken = engine.started
    engine.resume("a")
    engine.step()
    assert (engine.started, taken) == (["a"], ["b"])
    engine.pause("a")
    engine.resume("a")
    engine.step()
    assert engine.started == []
    run(engine)


def test_the_integrity_check_notices_a_wrong_pause() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt_of(20)))
    engine.step()
    group = engine._groups["a"]
    group.paused_at = 0
    problems = engine.check()
    assert any("paused" in problem and "a[0]" in problem for problem in problems)
    assert any("counted" in problem for problem in problems)
