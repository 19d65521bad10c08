"""Requests that go on from what another engine produced: the same tokens as if that engine had not been lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.core import Engine
from octavo.engine.request import EngineRequest, ProducedSequence, SequenceOutput
from octavo.errors import ParameterError
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
    replayed,
    request,
    run,
)
from tests.engine.test_engine import CAPACITIES, POLICIES, assert_expected, mixed_requests

Answers = dict[tuple[str, int], Answer]


def produced(*outputs: list[int], finished: tuple[int, ...] = ()) -> list[ProducedSequence]:
    return [ProducedSequence(output, index in finished) for index, output in enumerate(outputs)]


def interrupted(items: list[EngineRequest], steps: int, **config: Any) -> tuple[Engine, Answers]:
    """Run for some steps, lose the engine, and add what is unfinished to another one."""
    first, _ = make_engine(**config)
    answers: Answers = {}
    for item in items:
        first.add(item)
    for _ in range(steps):
        collect(first.step(), answers)
    second, _ = make_engine(**config)
    for item in items:
        again = replayed(item, answers)
        if again is not None:
            second.add(again)
    assert second.check() == []
    return second, answers


def finish(engine: Engine, answers: Answers) -> list[SequenceOutput]:
    everything = []
    while engine.has_work():
        outputs = engine.step()
        collect(outputs, answers)
        everything += outputs
        assert engine.check() == []
    assert engine.stats().referenced_blocks == 0
    return everything


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
@pytest.mark.parametrize(
    "config",
    [
        {"num_blocks": 200},
        {"num_blocks": 200, "enable_prefix_caching": False},
        {"num_blocks": 9},
        {"num_blocks": 12, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"num_blocks": 60, "max_num_batched_tokens": 7, "max_num_seqs": 3, "policy": "shortest"},
    ],
    ids=str,
)
def test_every_request_gets_the_answer_of_an_undisturbed_run(steps: int, config: dict[str, Any]) -> None:
    items = mixed_requests(6, 16)
    engine, answers = interrupted(items, steps, **config)
    finish(engine, answers)
    assert_expected(answers, items)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    num_blocks=st.integers(9, 40),
    budget=st.integers(1, 80),
    seqs=st.integers(1, 12),
    policy=st.sampled_from(POLICIES),
    capacity=st.sampled_from(CAPACITIES),
    caching=st.booleans(),
)
def test_crashes_pauses_and_aborts_in_any_order_change_no_token(
    seed: int, num_blocks: int, budget: int, seqs: int, policy: str, capacity: str, caching: bool
) -> None:
    config: dict[str, Any] = {
        "num_blocks": num_blocks,
        "max_num_batched_tokens": budget,
        "max_num_seqs": seqs,
        "policy": policy,
        "capacity": capacity,
        "enable_prefix_caching": caching,
        "starvation_bound": 3,
    }
    rng = random.Random(seed)
    stock = mixed_requests(seed, 10, policy=policy)
    answers: Answers = {}
    added: list[EngineRequest] = []
    aborted: set[str] = set()
    paused: set[str] = set()
    engine, _ = make_engine(**config)

    def live() -> list[EngineRequest]:
        return [item for item in added if item.request_id not in aborted and replayed(item, answers) is not None]

    def replay() -> Engine:
        again, _ = make_engine(**config)
        for item in live():
            going_on = replayed(item, answers)
            assert going_on is not None
            again.add(going_on)
            if item.request_id in paused:
                assert again.pause(item.request_id)
        return again

    while len(added) < len(stock) or live():
        operation = rng.random()
        item = rng.choice(live() or stock[:1])
        name = item.request_id
        if operation < 0.2 and len(added) < len(stock):
            added.append(stock[len(added)])
            engine.add(added[-1])
        elif operation < 0.3 and live():
            assert engine.pause(name) == (name not in paused)
            paused.add(name)
        elif operation < 0.4 or not engine.has_work():
            assert engine.resume(name) == (name in paused and item in live())
            paused.discard(name)
        elif operation < 0.42 and live():
            assert engine.abort(name)
            aborted.add(name)
        elif operation < 0.47:
            if rng.random() < 0.5:
                engine.step()  # the frame is lost with the engine
            engine = replay()
        else:
            collect(engine.step(), answers)
        assert engine.check() == []
    assert engine.stats().referenced_blocks == 0
    assert_expected(
        {key: found for key, found in answers.items() if key[0] not in aborted},
        [item for item in added if item.request_id not in aborted],
    )
    for (name, index), answer in answers.items():
        if name in aborted:
            whole = expected_answer(next(item for item in added if item.request_id == name), index)
            assert answer.tokens == whole.tokens[: len(answer.tokens)]


def test_produced_tokens_count_towards_max_tokens_and_min_tokens() -> None:
    whole = expected_answer(request("a", prompt_of(20), greedy(30)))
    early = whole.tokens[4]
    assert early not in whole.tokens[:4]
    item = request("a", prompt_of(20), greedy(30, stop_token_ids=[early]), produced=produced(whole.tokens[:3]))
    engine, _ = make_engine()
    answer = run(engine, [item])["a", 0]
    assert (answer.tokens, answer.finish_reason, answer.stop_reason) == (whole.tokens[3:5], "stop", early)
    late = request("b", prompt_of(20), greedy(30, min_tokens=6), eos_ids=(early,))
    wanted = expected_answer(late).tokens
    assert len(wanted) > 5
    late.produced = produced(wanted[:3])
    assert run(engine, [late])["b", 0].tokens == wanted[3:]
    long = request("c", prompt_of(20), greedy(30), produced=produced(whole.tokens[:29]))
    answer = run(engine, [long])["c", 0]
    assert (answer.tokens, answer.finish_reason) == (whole.tokens[29:], "length")


def test_the_state_of_the_sampler_is_that_of_the_produced_tokens() -> None:
    params = SamplingParams.from_mapping(
        {
            "temperature": 0.0,
            "max_tokens": 30,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "min_tokens": 9,
            "stop_token_ids": [1],
            "bad_words": ["three words here"],
        },
        bad_words_ids=[(3, 4, 5)],
    )
    undisturbed, _ = make_engine()
    undisturbed.add(request("a", prompt_of(20), params))
    tokens = [output.new_tokens[0].token for _ in range(8) for output in undisturbed.step()]
    again, _ = make_engine()
    again.add(request("a", prompt_of(20), params, produced=produced(tokens)))
    rows = [engine._groups["a"].sequences[0].row for engine in (undisturbed, again)]
    (parts, counts), (parts_again, counts_again) = [row.lists() for row in rows]  # type: ignore[union-attr]
    assert counts == counts_again
    assert [part.tolist() for part in parts] == [part.tolist() for part in parts_again]
    assert rows[0].num_output == rows[1].num_output == 8  # type: ignore[union-attr]


def test_the_others_go_on_at_once_when_the_first_sequence_has_tokens_or_has_finished() -> None:
    item = request("a", prompt_of(20), SamplingParams(n=3, seed=1, max_tokens=10))
    wanted = [expected_answer(item, index).tokens for index in range(3)]
    for before in (
        produced(wanted[0], wanted[1][:2], [], finished=(0,)),
        produced([], wanted[1][:2], [], finished=(0,)),
        produced(wanted[0][:4], wanted[1], [], finished=(1,)),
    ):
        for caching in (True, False):
            engine, _ = make_engine(enable_prefix_caching=caching)
            engine.add(request("a", item.prompt_ids, item.params, produced=before))
            assert len(engine.scheduler.waiting) == 2
            answers = run(engine)
            assert len(answers) == 2
            for (_, index), answer in answers.items():
                assert list(before[index].token_ids) + answer.tokens == wanted[index]


def test_the_others_are_held_until_the_first_sequence_has_its_first_token() -> None:
    item = request("a", prompt_of(40), SamplingParams(n=3, seed=1, max_tokens=10))
    engine, _ = make_engine(max_num_batched_tokens=16)
    engine.add(request("a", item.prompt_ids, item.params, produced=produced([], [], [], finished=(2,))))
    for _ in range(3):
        assert engine.stats().waiting + engine.stats().running == 2
        assert len(engine.scheduler.waiting) + len(engine.scheduler.running) == 1
        engine.step()
    answers = run(engine)
    assert answers["a", 1].same_as(expected_answer(item, 1))
    assert ("a", 2) not in answers


@pytest.mark.parametrize("caching", [True, False])
def test_what_came_with_the_first_token_does_not_come_again(caching: bool) -> None:
    item = request("a", prompt_of(40), greedy(10, prompt_logprobs=0))
    engine, answers = interrupted([item], 3, num_blocks=64, enable_prefix_caching=caching)
    outputs = finish(engine, answers)
    assert all(output.prompt_logprobs is None and output.num_cached_tokens == 0 for output in outputs)
    assert answers["a", 0].prompt_logprobs == expected_scores(item)
    assert engine.counters.prefix_queries == 0


def test_prompt_log_probabilities_come_after_a_crash_in_the_middle_of_the_prompt() -> None:
    item = request("a", prompt_of(40), greedy(10, prompt_logprobs=0))
    engine, answers = interrupted([item], 2, num_blocks=64, max_num_batched_tokens=16)
    assert not answers
    finish(engine, answers)
    assert answers["a", 0].prompt_logprobs == expected_scores(item)


def test_a_request_that_had_tokens_is_not_said_to_have_started_again() -> None:
    item = request("a", prompt_of(20))
    engine, _ = interrupted([item], 0, num_blocks=64)
    engine.step()
    assert engine.started == ["a"]
    engine, answers = interrupted([item], 2, num_blocks=64)
    engine.step()
    assert engine.started == []
    finish(engine, answers)


@pytest.mark.parametrize(
    ("before", "params", "field", "value"),
    [
        (produced([1]), SamplingParams(n=2, seed=1), "produced", "1 sequences"),
        (produced([1, VOCAB]), greedy(), "produced", VOCAB),
        (produced([1, -1]), greedy(), "produced", -1),
        (produced([1] * 8), greedy(8), "produced", "8 tokens"),
        (produced([1], finished=(0,)), greedy(), "produced", "finished sequences only"),
        (produced([1]), SamplingParams(), "seed", None),
    ],
    ids=["count", "vocabulary", "negative", "limit", "finished", "seed"],
)
def test_what_cannot_have_been_produced_is_refused(
    before: list[ProducedSequence], params: SamplingParams, field: str, value: object
) -> None:
    engine, _ = make_engine()
    with pytest.raises(ParameterError) as caught:
        engine.add(request("a", prompt_of(20), params, produced=before))
    assert (caught.value.field, caught.value.value) == (field, value)
    assert not engine.has_work()
