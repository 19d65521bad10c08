"""The policy ``fair``: tenants take turns by the tokens they were given, and nobody saves up or waits without bound."""

from __future__ import annotations

import random
from collections import Counter
from zlib import crc32

import numpy as np

from octavo.engine.core import Engine
from octavo.engine.fairness import FairQueue
from octavo.engine.sequence import Group, Sequence
from octavo.sampling.params import SamplingParams
from tests.engine.fakes import expected_answer, greedy, make_engine, prompt_of, request, run


def add(engine: Engine, name: str, tenant: str | None, prompt: int = 10, answer: int = 2) -> None:
    engine.add(request(name, prompt_of(prompt, crc32(name.encode())), greedy(answer), tenant=tenant))


def start_order(engine: Engine, steps: int = 100_000) -> list[str]:
    order: list[str] = []
    while engine.has_work() and steps:
        engine.step()
        order += engine.started
        assert engine.check() == []
        steps -= 1
    return order


def test_a_tenant_with_few_requests_is_not_behind_all_those_of_another() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="fair")
    for number in range(6):
        add(engine, f"a{number}", "a")
    for number in range(3):
        add(engine, f"b{number}", "b")
    assert start_order(engine) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_one_step_admits_from_every_tenant_in_turn() -> None:
    engine, _ = make_engine(max_num_seqs=6, policy="fair")
    for tenant in "abc":
        for number in range(4):
            add(engine, f"{tenant}{number}", tenant)
    engine.step()
    assert engine.started == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_requests_without_a_tenant_share_one_turn_and_run_by_arrival() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="fair")
    for number in range(4):
        add(engine, f"n{number}", None)
    add(engine, "a0", "a")
    assert start_order(engine) == ["n0", "a0", "n1", "n2", "n3"]


def test_turns_are_measured_in_tokens_of_prompt_and_answer() -> None:
    engine, _ = make_engine(400, max_num_seqs=1, policy="fair")
    for number in range(30):
        add(engine, f"long{number}", "long", 10, 50)
        add(engine, f"short{number}", "short", 10, 5)
        add(engine, f"read{number}", "read", 50, 10)
    turns = Counter(name.rstrip("0123456789") for name in start_order(engine, steps=600))
    assert turns["short"] > 3 * turns["long"]
    assert abs(turns["long"] - turns["read"]) <= 2


def test_cached_prompt_tokens_are_not_counted() -> None:
    engine, _ = make_engine(400, max_num_seqs=1, policy="fair")
    shared = prompt_of(160)
    run(engine, [request("warm", shared, greedy(1), tenant="c")])
    for number in range(20):
        engine.add(request(f"c{number}", [*shared, number], greedy(4), tenant="c"))
        add(engine, f"o{number}", "o", 161, 4)
    assert Counter(name[0] for name in start_order(engine)[:21]) == {"c": 20, "o": 1}


def test_a_tenant_that_was_away_does_not_run_alone_when_it_comes_back() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="fair")
    for number in range(20):
        add(engine, f"a{number}", "a")
    start_order(engine, steps=20)
    for number in range(5):
        add(engine, f"b{number}", "b")
    order = start_order(engine, steps=8)
    assert {name[0] for name in order[:2]} == {"a", "b"}
    assert abs(sum(1 if name[0] == "a" else -1 for name in order)) <= 1
    start_order(engine)
    for number in range(4):
        add(engine, f"d{number}", "d")
        add(engine, f"e{number}", "e")
    order = start_order(engine)
    assert Counter(name[0] for name in order[:4]) == {"d": 2, "e": 2}


def test_many_requests_of_one_tenant_do_not_hide_another() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="fair")
    for number in range(300):
        add(engine, f"a{number}", "a")
    add(engine, "b0", "b")
    assert start_order(engine, steps=4) == ["a0", "b0"]


def test_one_that_does_not_fit_lets_other_tenants_go_on_but_not_for_ever() -> None:
    engine, _ = make_engine(8, policy="fair", starvation_bound=6)
    add(engine, "a-running", "a", 10, 30)
    engine.step()
    add(engine, "whole", "a", 120, 8)
    order: list[str] = []
    for number in range(60):
        add(engine, f"b{number}", "b", 10, 6)
        engine.step()
        order += engine.started
    order += start_order(engine)
    assert 1 <= order.index("whole") <= 20
    assert len(order) == 61


def test_several_answers_and_a_pause_work_with_turns() -> None:
    engine, _ = make_engine(max_num_seqs=2, policy="fair")
    items = [
        request(f"{tenant}{number}", prompt_of(20, number), SamplingParams(n=3, seed=1, max_tokens=6), tenant=tenant)
        for number in range(4)
        for tenant in "ab"
    ]
    for item in items:
        engine.add(item)
    assert engine.pause("a0")
    start_order(engine, steps=5)
    engine.resume("a0")
    for name in ("b1", "b2"):
        engine.abort(name)
    answers = run(engine)
    assert answers["a3", 2].same_as(expected_answer(items[6], 2))
    assert len(engine.scheduler.waiting) == 0


def test_tenants_that_came_once_are_forgotten() -> None:
    engine, _ = make_engine(policy="fair")
    for number in range(5000):
        add(engine, f"r{number}", f"tenant{number}", 3, 1)
        if number % 50 == 0:
            run(engine, check=False)
    run(engine, check=False)
    assert len(engine.scheduler.waiting._served) < 2500  # type: ignore[attr-defined]


def test_the_order_is_that_of_looking_at_every_tenant_each_time() -> None:
    chance = random.Random(5)
    queue = FairQueue()
    waiting: dict[str, Sequence] = {}
    arrival = 0
    for _ in range(300):
        for _ in range(chance.randrange(4)):
            tenant = f"t{chance.randrange(40)}"
            group = Group(
                request(f"r{arrival}", prompt_of(5), greedy(), tenant=tenant), np.arange(5, dtype=np.int32), b"", 0
            )
            seq = Sequence(group, 0, (arrival,), 20, 16)
            queue.add(seq)
            waiting[seq.request_id] = seq
            arrival += 1
        served = queue._served
        passed = dict.fromkeys(served, 0)
        left = sorted(waiting.values(), key=lambda seq: seq.rank)
        expected = []
        while left and len(expected) < 12:
            heads = {seq.group.request.tenant: seq for seq in reversed(left)}.values()
            first = min(heads, key=lambda seq: (served[tenant_of(seq)] + passed[tenant_of(seq)], seq.rank))
            passed[tenant_of(first)] += first.num_tokens
            left.remove(first)
            expected.append(first.request_id)
        found = list(queue.candidates(12))
        assert [seq.request_id for seq in found] == expected
        for seq in found[: chance.randrange(3)]:
            queue.remove(waiting.pop(seq.request_id))
            queue.charge(seq, chance.randrange(1, 30))


def tenant_of(seq: Sequence) -> str | None:
    return seq.group.request.tenant
