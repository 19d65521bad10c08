"""LLM: prompts of every kind, parameters for all or each, order, failures of one request, Ctrl-C, streams."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from octavo.errors import CapacityError, ConfigError, EngineDeadError, ParameterError
from octavo.frontend.llm import LLM
from octavo.frontend.loading import LoadedModel
from octavo.sampling.params import SamplingParams
from tests.frontend.fakes import BOS, VOCAB, Script, ScriptBackend, echo, load_fake, says


def make(script: Script | ScriptBackend, **options: Any) -> LLM:
    return LLM.from_loaded(load_fake(script, **options))


def backend_of(llm: LLM) -> ScriptBackend:
    loaded = llm._loaded
    assert isinstance(loaded, LoadedModel)
    backend = loaded.backend
    assert isinstance(backend, ScriptBackend)
    return backend


def texts(outputs: Sequence[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def assert_clean(llm: LLM) -> None:
    assert llm._loaded is not None
    engine = llm._loaded.engine
    assert not engine.has_work()
    assert engine.check() == []
    assert engine.stats().referenced_blocks == 0
    assert len(llm._outputs) == 0


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ({"prompt": "one"}, ["one"]),
        ({"prompt_token_ids": list(b"ids")}, ["ids"]),
        (list(b"ids"), ["ids"]),
        ([list(b"ids"), {"prompt": "two", "cache_salt": "a"}, "three"], ["ids", "two", "three"]),
        ([], []),
    ],
)
def test_prompts_of_every_kind_are_taken(prompts: Any, expected: list[str]) -> None:
    # The script repeats the prompt, so the answer shows what the engine was given.
    llm = make(echo)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6), use_tqdm=False)
    for output, text in zip(outputs, expected, strict=True):
        ids = output.prompt_token_ids
        assert bytes(token for token in ids if token != BOS).decode() == text
        assert output.outputs[0].token_ids == (ids * 6)[:6]
    assert_clean(llm)


def test_results_are_in_the_order_of_the_prompts_whenever_they_finish() -> None:
    llm = make(echo, max_num_seqs=3)
    lengths = [9, 1, 5, 2, 7, 1, 3]
    prompts = [f"{index}{'x' * 20}" for index in range(len(lengths))]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 7


def test_one_parameter_set_is_for_all_and_a_list_must_be_as_long_as_the_prompts() -> None:
    llm = make(says("abcdef"))
    assert texts(llm.generate(["p", "q"], SamplingParams(max_tokens=3), use_tqdm=False)) == ["abc", "abc"]
    with pytest.raises(ParameterError, match="2 prompts and 1") as caught:
        llm.generate(["p", "q"], [SamplingParams()], use_tqdm=False)
    assert caught.value.field == "sampling_params"
    with pytest.raises(ParameterError, match="sampling_params"):
        llm.generate(["p"], {"temperature": 1}, use_tqdm=False)  # type: ignore[arg-type]


def test_without_parameters_the_generation_config_of_the_model_is_used() -> None:
    loaded = load_fake(says("x" * 100))
    loaded.generation_config = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "max_new_tokens": 5, "eos_token_id": 2}
    llm = LLM.from_loaded(loaded)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.9, top_k=40, max_tokens=5)
    assert texts(llm.generate("p", use_tqdm=False)) == ["xxxxx"]
    assert len(make(says("x" * 100)).generate("p", use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_a_generation_config_with_an_impossible_value_is_a_configuration_error() -> None:
    loaded = load_fake(says("x"))
    loaded.generation_config = {"temperature": -3}
    with pytest.raises(ConfigError, match="temperature"):
        LLM.from_loaded(loaded)


def test_all_prompts_are_checked_before_any_is_run() -> None:
    llm = make(says("x"))
    with pytest.raises(ParameterError, match="the prompt is empty"):
        llm.generate(["fine", []], use_tqdm=False)
    assert backend_of(llm).steps == 0
    assert_clean(llm)


def test_a_request_that_can_never_fit_is_refused_and_the_others_dropped() -> None:
    llm = make(ScriptBackend(says("x"), num_blocks=4, max_model_len=256))
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=100)]
    with pytest.raises(CapacityError):
        llm.generate(["fits", "does not"], params, use_tqdm=False)
    assert_clean(llm)
    assert texts(llm.generate("fits", SamplingParams(max_tokens=1), use_tqdm=False)) == ["x"]


def test_a_failing_request_carries_its_error_and_the_others_finish() -> None:
    backend = ScriptBackend(says("fine"))
    backend.fail_sequences = {7}
    llm = make(backend)
    good, bad = llm.generate([[8, 8], [7, 7]], SamplingParams(), use_tqdm=False)
    assert good.outputs[0].text == "fine"
    assert good.error is None
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error == "logits are not finite"
    assert_clean(llm)


def test_an_error_of_the_back_end_ends_the_llm_with_its_cause() -> None:
    backend = ScriptBackend(says("x" * 50))

    def explode(step: int) -> None:
        if step == 3:
            raise RuntimeError("wires crossed")

    backend.before_step = explode
    llm = make(backend)
    with pytest.raises(EngineDeadError, match="wires crossed"):
        llm.generate("p", use_tqdm=False)
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        llm.generate("p", use_tqdm=False)
    llm.close()
    assert backend.closed


def test_ctrl_c_waits_for_the_step_and_leaves_the_engine_clean() -> None:
    backend = ScriptBackend(says("x" * 200))
    completed = []

    def interrupt(step: int) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        completed.append(step)

    backend.before_step = interrupt
    llm = make(backend)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["p", "q"], SamplingParams(max_tokens=100), use_tqdm=False)
    assert completed == [1, 2, 3, 4]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_clean(llm)
    backend.before_step = lambda step: None
    assert texts(llm.generate("p", SamplingParams(max_tokens=2), use_tqdm=False)) == ["xx"]


def test_a_second_ctrl_c_does_not_wait_for_the_step() -> None:
    backend = ScriptBackend(says("x" * 200))

    def interrupt(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    backend.before_step = interrupt
    llm = make(backend)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("p", use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate("p", use_tqdm=False)


def test_generate_works_in_a_thread_that_is_not_the_main_one() -> None:
    llm = make(says("ok"))
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(texts(llm.generate("p", use_tqdm=False))))
    thread.start()
    thread.join()
    assert found == ["ok"]


def test_chat_writes_the_template_without_more_special_tokens() -> None:
    llm = make(says("hi"))
    conversation = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    (output,) = llm.chat(conversation, use_tqdm=False)
    assert output.prompt == "(system)be kind(user)hello(assistant)"
    assert output.prompt_token_ids == list(output.prompt.encode())
    outputs = llm.chat([conversation, conversation[1:]], use_tqdm=False)
    assert [each.prompt for each in outputs] == [output.prompt, "(user)hello(assistant)"]
    (output,) = llm.chat(
        [*conversation, {"role": "assistant", "content": "Well"}],
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert output.prompt == "[1 tools](system)be kind(user)hello(assistant)Well"
    (other,) = llm.chat(conversation, use_tqdm=False, chat_template_kwargs={"mood": "good"})
    assert other.prompt == "(system)be kind(user)hello[good](assistant)"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ([[]], "messages"),
        (["hello"], "messages"),
        ([{"content": "x"}], "role"),
        ([{"role": "user"}], "content"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        make(says("x")).chat(messages, use_tqdm=False)
    assert caught.value.field == field


def test_a_new_answer_and_a_continued_message_exclude_each_other() -> None:
    with pytest.raises(ParameterError, match="add_generation_prompt=False"):
        make(says("x")).chat([{"role": "user", "content": "x"}], continue_final_message=True, use_tqdm=False)


def test_requests_without_a_seed_get_one_from_the_engine_seed_and_their_number() -> None:
    def seeds(**options: Any) -> dict[int, int]:
        llm = make(says("x"), **options)
        llm.generate([[1], [2]], SamplingParams(max_tokens=1), use_tqdm=False)
        llm.generate([[3], [4]], [SamplingParams(max_tokens=1, seed=5), SamplingParams(max_tokens=1)], use_tqdm=False)
        return backend_of(llm).seeds

    first = seeds(seed=0)
    assert first == seeds(seed=0)
    assert first[3] == 5
    assert len(set(first.values())) == 4
    other = seeds(seed=1)
    assert all(other[token] != first[token] for token in (1, 2, 4))
    assert seeds(seed=None)[1] != seeds(seed=None)[1]


def test_the_progress_bar_counts_requests_and_shows_rates() -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, **settings: Any) -> None:
            self.settings, self.count, self.postfix, self.closed = settings, 0, "", False
            bars.append(self)

        def update(self, count: int) -> None:
            self.count += count

        def set_postfix_str(self, text: str) -> None:
            self.postfix = text

        def close(self) -> None:
            self.closed = True

    make(says("abc")).generate(["p", "q", "r"], use_tqdm=Bar)
    (bar,) = bars
    assert bar.settings["total"] == 3
    assert bar.count == 3
    assert bar.closed
    assert "input: " in bar.postfix
    assert "output: " in bar.postfix


def test_the_default_progress_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    make(says("abc")).generate("p")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Processed prompts: 100%" in captured.err


def test_a_stream_gives_every_step_and_closing_it_aborts_the_request() -> None:
    llm = make(says("abcdef"))
    outputs = list(llm.stream("p", SamplingParams(max_tokens=4)))
    assert texts(outputs) == ["a", "ab", "abc", "abcd"]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert texts(list(llm.stream("p", SamplingParams(max_tokens=3), output_kind="delta"))) == ["a", "b", "c"]
    stream = llm.stream("p", SamplingParams(max_tokens=100))
    next(stream)
    stream.close()
    assert_clean(llm)


def test_generate_and_streams_go_on_together() -> None:
    llm = make(says("abcdef"))
    stream = llm.stream("p", SamplingParams(max_tokens=6))
    assert next(stream).outputs[0].text == "a"
    assert texts(llm.generate("q", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ab"]
    assert [output.outputs[0].text for output in stream][-1] == "abcdef"
    assert_clean(llm)


def test_prompt_logits_are_those_of_the_back_end_for_checked_ids() -> None:
    llm = make(says("x"))
    assert len(llm.prompt_logits([1, 2, 3])) == 3
    for wrong in ([], [VOCAB], [-1], [1] * 257):
        with pytest.raises(ParameterError):
            llm.prompt_logits(wrong)


def test_a_closed_llm_says_so_and_frees_the_back_end() -> None:
    with make(says("x")) as llm:
        backend = backend_of(llm)
        assert llm.stats().counters.steps == 0
        assert llm.reset_prefix_cache()
    assert backend.closed
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("p", use_tqdm=False)
    llm.close()


def test_the_profile_needs_to_be_asked_for() -> None:
    with pytest.raises(ParameterError, match="profile=True"):
        make(says("x")).profile()
    llm = make(says("x"), profile=True)
    llm.generate("p", use_tqdm=False)
    assert llm.profile()[0]["op"] == "script"


def test_the_profile_of_steps_says_what_each_phase_took() -> None:
    with pytest.raises(ParameterError, match="profile=True"):
        make(says("x")).profile_steps()
    llm = make(says("x"), profile=True)
    llm.generate(["pp", "q"], use_tqdm=False)
    prefill, decode = llm.profile_steps()
    assert (prefill["step"], prefill["steps"], prefill["tokens"], prefill["sequences"]) == ("prefill", 1, 5, 2)
    assert (decode["step"], decode["steps"], decode["tokens"], decode["sequences"]) == ("decode", 1, 2, 2)
    for step in (prefill, decode):
        assert step["phases_ms"]["scheduling"] > 0
        assert step["phases_ms"]["detokenising"] > 0
        assert step["phases_ms"]["framing"] == 0
    llm.reset_profile()
    assert llm.profile_steps() == []
