"""Requests one by one: what is refused, how sequences end, aborts, failures, and what is reported."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.errors import CapacityError, ConfigError, EngineDeadError, ParameterError
from octavo.sampling.params import SamplingParams
from tests.engine.fakes import (
    VOCAB,
    FakeBackend,
    expected_answer,
    expected_scores,
    greedy,
    make_engine,
    prompt_of,
    request,
    run,
)


def test_what_can_never_fit_is_refused_at_once_with_the_three_numbers() -> None:
    engine, _ = make_engine(4, max_model_len=500)
    with pytest.raises(CapacityError, match=r"up to 109 tokens \(7 blocks of 16\).*64 \(4 blocks\).*500") as caught:
        engine.add(request("big", prompt_of(100), greedy(10)))
    assert (caught.value.needed, caught.value.available) == (7, 4)
    with pytest.raises(CapacityError):
        engine.add(request("too-long-prompt", prompt_of(65), greedy(None)))
    assert not engine.has_work()
    small = request("small", prompt_of(10))
    assert run(engine, [small])["small", 0].same_as(expected_answer(small))
    assert engine.stats().counters.refused == 2


def test_a_prompt_without_room_for_an_answer_in_the_model_is_refused() -> None:
    engine, _ = make_engine(max_model_len=32)
    with pytest.raises(CapacityError, match=r"32 tokens.*max_model_len is 32") as caught:
        engine.add(request("a", prompt_of(32)))
    assert (caught.value.needed, caught.value.available, caught.value.unit) == (33, 32, "tokens")
    assert len(run(engine, [request("b", prompt_of(31))])["b", 0].tokens) == 1


def test_without_max_tokens_a_sequence_ends_where_the_model_or_the_cache_ends() -> None:
    engine, _ = make_engine(64, max_model_len=100)
    answer = run(engine, [request("a", prompt_of(10), greedy(None))])["a", 0]
    assert (len(answer.tokens), answer.finish_reason) == (90, "length")
    engine, _ = make_engine(2, max_model_len=100)
    answer = run(engine, [request("a", prompt_of(10), greedy(None))])["a", 0]
    assert (len(answer.tokens), answer.finish_reason) == (23, "length")  # 32 places, and the last token needs none


@pytest.mark.parametrize(
    ("prompt", "value"),
    [([], "shape (0,)"), ([1, VOCAB], VOCAB), ([-1], -1), ([[1]], "shape (1, 1)"), ([0.5], "type float64")],
)
def test_a_wrong_prompt_is_refused_by_name(prompt: list, value: object) -> None:
    engine, _ = make_engine()
    with pytest.raises(ParameterError) as caught:
        engine.add(request("a", prompt))
    assert (caught.value.field, caught.value.value) == ("prompt_ids", value)
    assert not engine.has_work()


def test_token_ids_outside_int32_do_not_wrap_into_the_vocabulary() -> None:
    engine, _ = make_engine()
    with pytest.raises(ParameterError):
        engine.add(request("a", [1 << 32]))
    with pytest.raises(ParameterError):
        engine.add(request("a", [1 << 80]))


def test_a_request_id_in_use_a_priority_without_its_policy_and_foreign_token_ids_are_refused() -> None:
    engine, _ = make_engine()
    engine.add(request("a", [1]))
    with pytest.raises(ParameterError, match="request_id"):
        engine.add(request("a", [1]))
    with pytest.raises(ParameterError, match="priority"):
        engine.add(request("b", [1], priority=1))
    with pytest.raises(ParameterError, match="logit_bias"):
        engine.add(request("c", [1], greedy(logit_bias={VOCAB: 1.0})))
    assert set(run(engine)) == {("a", 0)}
    assert len(run(engine, [request("a", [1])])) == 1


@pytest.mark.parametrize("field", ["num_blocks", "max_num_seqs", "max_num_batched_tokens", "policy", "capacity"])
def test_a_wrong_setting_is_refused_by_name(field: str) -> None:
    settings = {"num_blocks": 4, "max_model_len": 64} | {field: "x" if field in ("policy", "capacity") else 0}
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**settings)


def test_an_engine_and_a_back_end_that_do_not_agree_are_refused() -> None:
    backend = FakeBackend(4, max_model_len=64)
    for settings, name in (
        ({"num_blocks": 5, "max_model_len": 64}, "num_blocks"),
        ({"num_blocks": 4, "max_model_len": 65}, "max_model_len"),
        ({"num_blocks": 4, "max_model_len": 64, "block_size": 32}, "block_size"),
    ):
        with pytest.raises(ConfigError, match=name):
            Engine(EngineConfig(**settings), backend)


def test_stop_tokens_end_a_sequence_and_say_which_unless_it_is_the_models_own() -> None:
    free = expected_answer(request("a", prompt_of(9), greedy(20)))
    place = next(place for place, token in enumerate(free.tokens) if place > 2 and free.tokens.count(token) == 1)
    token = free.tokens[place]
    for params, eos, reason, stop_reason in (
        (greedy(20, stop_token_ids=[token]), (), "stop", token),
        (greedy(20), (token,), "stop", None),
        (greedy(20, ignore_eos=True), (token,), "length", None),
        (greedy(20, ignore_eos=True, stop_token_ids=[token]), (token,), "stop", token),
        (greedy(20, stop_token_ids=[token], min_tokens=place + 1), (), "stop", token),
        (greedy(20, stop_token_ids=[token], min_tokens=place + 2), (), "length", None),
    ):
        engine, _ = make_engine()
        answer = run(engine, [request("a", prompt_of(9), params, eos_ids=eos)])["a", 0]
        assert (answer.finish_reason, answer.stop_reason) == (reason, stop_reason)
        assert len(answer.tokens) == (place + 1 if reason == "stop" else 20)


def test_a_stop_token_as_the_last_allowed_token_counts_as_a_stop() -> None:
    token = expected_answer(request("a", prompt_of(9), greedy(1))).tokens[0]
    engine, _ = make_engine()
    answer = run(engine, [request("a", prompt_of(9), greedy(1), eos_ids=(token,))])["a", 0]
    assert answer.finish_reason == "stop"


def test_an_abort_frees_every_block_at_once_wherever_the_request_is() -> None:
    engine, _ = make_engine(8, max_num_seqs=2, enable_prefix_caching=False, max_num_batched_tokens=16)
    params = SamplingParams(n=2, seed=1, max_tokens=20)
    for name in ("prefilling", "waiting"):
        engine.add(request(name, prompt_of(40, len(name)), params))
    engine.step()
    assert engine.stats().referenced_blocks > 0
    outputs = engine.abort("prefilling")
    assert [(output.index, output.finish_reason) for output in outputs] == [(0, "abort"), (1, "abort")]
    assert engine.check() == []
    engine.abort("waiting")
    assert engine.stats().referenced_blocks == 0
    assert engine.stats().waiting == 0
    assert not engine.has_work()
    assert engine.abort("waiting") == []
    assert engine.step() == []
    assert engine.counters.finished["abort"] == 4


def test_one_sequence_can_be_ended_while_its_siblings_go_on() -> None:
    engine, _ = make_engine()
    item = request("a", prompt_of(20), SamplingParams(n=3, seed=1, max_tokens=10))
    engine.add(item)
    engine.step()
    engine.step()
    assert engine.finish("a", 1)
    assert not engine.finish("a", 1)
    assert not engine.finish("a", 3)
    assert not engine.finish("b", 0)
    assert engine.check() == []
    answers = run(engine)
    assert set(answers) == {("a", 0), ("a", 2)}
    assert answers["a", 2].finish_reason == "length"


def test_siblings_go_on_when_the_first_sequence_ends_before_the_prompt_is_computed() -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    item = request("a", prompt_of(20), SamplingParams(n=3, seed=1, max_tokens=5))
    engine.add(item)
    engine.step()
    assert engine.finish("a", 0, "abort")
    answers = run(engine)
    assert all(answers["a", index].same_as(expected_answer(item, index)) for index in (1, 2))


def test_answers_of_one_request_differ_and_share_the_prompt() -> None:
    for caching in (True, False):
        engine, backend = make_engine(enable_prefix_caching=caching)
        item = request("a", prompt_of(40), SamplingParams(n=4, seed=1, max_tokens=6))
        answers = run(engine, [item])
        assert len({tuple(answers["a", index].tokens) for index in range(4)}) == 4
        # The prompt once, then its last token for each of the others, and five decodes each.
        assert sum(backend.steps) == 40 + 3 + 4 * 5
        assert engine.counters.block_copies == 3


def test_children_share_all_but_the_last_prompt_block() -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt_of(40), SamplingParams(n=4, seed=1, max_tokens=6)))
    for _ in range(3):
        engine.step()
    assert engine.stats().referenced_blocks == 2 + 4


def test_best_of_generates_as_many_sequences() -> None:
    engine, _ = make_engine()
    assert len(run(engine, [request("a", [1, 2], SamplingParams(n=2, best_of=5, max_tokens=2), seed=3)])) == 5


def test_a_request_without_a_seed_uses_the_front_ends_and_else_draws_one() -> None:
    engine, _ = make_engine()
    unseeded = SamplingParams(max_tokens=8)
    given = request("a", [1, 2], unseeded, seed=-3)
    assert run(engine, [given])["a", 0].same_as(expected_answer(given))
    drawn = {tuple(run(engine, [request("a", [1, 2], unseeded)])["a", 0].tokens) for _ in range(8)}
    assert len(drawn) > 1


@pytest.mark.parametrize("budget", [3, 16, 2048])
@pytest.mark.parametrize("blocks", [6, 64])
def test_prompt_logprobs_are_complete_and_equal_whatever_is_cached_cut_or_preempted(budget: int, blocks: int) -> None:
    engine, _ = make_engine(blocks, max_num_batched_tokens=budget)
    for round_number in range(2):
        items = [request(f"{round_number}{n}", prompt_of(33, n % 2), greedy(20, prompt_logprobs=0)) for n in range(4)]
        items += [request(f"{round_number}p{n}", prompt_of(33, n % 2), greedy(20)) for n in range(2)]
        answers = run(engine, items)
        for item in items:
            answer = answers[item.request_id, 0]
            wanted = None if item.params.prompt_logprobs is None else expected_scores(item)
            assert answer.prompt_logprobs == wanted
            assert answer.same_as(expected_answer(item))
            if wanted is not None:
                assert answer.num_cached_tokens == 0


def test_a_prompt_of_one_token_has_one_empty_log_probability() -> None:
    engine, _ = make_engine()
    assert run(engine, [request("a", [7], greedy(1, prompt_logprobs=2))])["a", 0].prompt_logprobs == [None]


def test_a_sequence_the_back_end_has_no_token_for_fails_alone() -> None:
    engine, backend = make_engine()
    bad, good = request("bad", [*prompt_of(20), 13]), request("good", [*prompt_of(20), 14])
    backend.error_tokens = {13}
    assert 13 not in expected_answer(good).tokens
    answers = run(engine, [bad, good])
    assert (answers["bad", 0].finish_reason, answers["bad", 0].error) == ("error", "logits are not finite")
    assert answers["good", 0].same_as(expected_answer(good))
    assert engine.stats().referenced_blocks == 0


def test_after_a_back_end_failure_nothing_is_lost_and_every_answer_is_still_right() -> None:
    engine, backend = make_engine(12, max_num_batched_tokens=40)
    items = [request(f"r{n}", prompt_of(32, n % 2), SamplingParams(n=2, seed=n, max_tokens=20)) for n in range(4)]
    for item in items:
        engine.add(item)
    answers = {}
    steps = 0
    while engine.has_work():
        steps += 1
        if steps % 3 == 0:
            backend.fail_next = RuntimeError("lost")
            with pytest.raises(RuntimeError, match="lost"):
                engine.step()
        else:
            for output in engine.step():
                answers.setdefault((output.request_id, output.index), []).extend(t.token for t in output.new_tokens)
        assert engine.check() == []
        assert steps < 2000
    for item in items:
        for index in range(2):
            assert answers[item.request_id, index] == expected_answer(item, index).tokens


def test_a_back_end_that_returns_no_token_is_a_typed_error() -> None:
    engine, backend = make_engine()
    original = backend.execute

    def forgetful(batch):  # type: ignore[no-untyped-def]
        output = original(batch)
        output.sampled = [None] * len(output.sampled)
        return output

    backend.execute = forgetful  # type: ignore[method-assign]
    engine.add(request("a", [1]))
    with pytest.raises(EngineDeadError):
        engine.step()


def test_statistics_add_up() -> None:
    engine, backend = make_engine()
    run(engine, [request("a", prompt_of(40), greedy(10)), request("b", prompt_of(20, 1), greedy(5))])
    run(engine, [request("c", prompt_of(40), greedy(10))])
    stats = engine.stats()
    counters = stats.counters
    assert counters.steps == len(backend.steps)
    assert counters.computed_tokens == sum(backend.steps)
    assert counters.generated_tokens == 25
    assert counters.finished["length"] == 3
    assert (counters.prefix_queries, counters.prefix_hits) == (100, 32)
    assert counters.admissions == 3
    assert stats.cached_blocks > 0
    assert stats.waste == 0.0
    assert stats.usage == 0.0


def test_the_work_and_the_times_of_the_last_step_are_reported() -> None:
    engine, _ = make_engine(max_num_batched_tokens=30)
    engine.add(request("a", prompt_of(40), greedy(3)))
    engine.add(request("b", prompt_of(5, 1), greedy(3)))
    busy = 0.0
    work = []
    while engine.has_work():
        engine.step()
        stats = engine.stats()
        work.append((stats.step_prefill_tokens, stats.step_decode_tokens))
        assert stats.step_tokens == stats.step_prefill_tokens + stats.step_decode_tokens
        assert min(stats.schedule_seconds, stats.execute_seconds, stats.process_seconds) >= 0.0
        busy += stats.schedule_seconds + stats.execute_seconds + stats.process_seconds
    assert work == [(30, 0), (15, 1), (0, 2), (0, 1)]
    assert engine.counters.busy_seconds == pytest.approx(busy)
    assert engine.counters.prefill_tokens == 45


def test_a_request_is_said_to_have_started_in_the_step_that_first_runs_it() -> None:
    engine, _ = make_engine(max_num_seqs=2)
    engine.add(request("a", prompt_of(20), SamplingParams(n=2, seed=1, max_tokens=3)))
    engine.add(request("b", prompt_of(20, 1)))
    started = []
    while engine.has_work():
        engine.step()
        started.append(engine.started)
    assert started[0] == ["a", "b"]
    assert not any(started[1:])
    assert engine.step() == []
    assert engine.started == []


def test_a_prompt_given_as_an_array_is_not_kept_nor_changed() -> None:
    engine, _ = make_engine()
    ids = np.asarray(prompt_of(20), np.int32)
    item = request("a", [], greedy(4))
    item.prompt_ids = ids
    engine.add(item)
    wanted = expected_answer(request("a", ids.tolist(), greedy(4)))
    ids[:] = 1
    assert run(engine)["a", 0].same_as(wanted)


def test_the_idle_check_of_debug_mode_reports_and_starts_over(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = make_engine(8, debug=True)
    run(engine, [request("a", prompt_of(20))])
    assert not caplog.records
    engine.pool.references[0] += 1
    item = request("b", prompt_of(20))
    with caplog.at_level(logging.ERROR):
        answers = run(engine, [item], check=False)
    assert answers["b", 0].same_as(expected_answer(item))
    assert "inconsistent" in caplog.text
    assert engine.check() == []
    assert run(engine, [request("c", prompt_of(20))])["c", 0].tokens == answers["b", 0].tokens
