"""Requests made of prompts and parameters, outputs made of tokens: truncation, limits, stop strings, choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from octavo.backends.interface import SampledToken
from octavo.engine.request import SequenceOutput
from octavo.errors import ParameterError
from octavo.frontend.input_processor import InputProcessor, parse_prompt, split_prompts
from octavo.frontend.llm import LLM
from octavo.frontend.output_processor import OutputProcessor, RequestState
from octavo.frontend.outputs import RequestOutput
from octavo.sampling.params import SamplingParams
from tests.frontend.fakes import BOS, EOS, VOCAB, ScriptBackend, byte_tokenizer, load_fake, says


def inputs(**settings: Any) -> InputProcessor:
    return InputProcessor(byte_tokenizer(), **{"vocab_size": VOCAB, "max_model_len": 32, **settings})


def prompt_ids(prompt: Any, **params: Any) -> list[int]:
    request, state = inputs().request("r", parse_prompt(prompt), SamplingParams(**params))
    assert np.asarray(request.prompt_ids).tolist() == state.prompt_ids
    return state.prompt_ids


# -- input


def test_a_list_of_integers_is_one_prompt_and_a_list_of_lists_several() -> None:
    assert [prompt.token_ids for prompt in split_prompts([1, 2, 3])] == [[1, 2, 3]]
    assert [prompt.token_ids for prompt in split_prompts([[1, 2], [3]])] == [[1, 2], [3]]
    assert [prompt.token_ids for prompt in split_prompts(np.array([1, 2]))] == [[1, 2]]  # type: ignore[arg-type]
    assert [prompt.token_ids for prompt in split_prompts([np.array([1, 2]), (3,)])] == [[1, 2], [3]]  # type: ignore[list-item]
    assert [prompt.text for prompt in split_prompts(["a", "b"])] == ["a", "b"]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        b"bytes",
        {"prompt": "a", "prompt_token_ids": [1]},
        {},
        {"prompt": 3},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [1, "2"]},
        {"prompt_token_ids": [True]},
        {"prompt": "a", "cache_salt": ""},
        {"prompt": "a", "multi_modal_data": {}},
        [1, 2.5],
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError):
        split_prompts(prompt)


def test_strings_get_special_tokens_and_token_ids_are_taken_as_they_are() -> None:
    assert prompt_ids("ab") == [BOS, 97, 98]
    assert prompt_ids([97, 98]) == [97, 98]
    assert prompt_ids({"prompt_token_ids": (97,)}) == [97]


def test_truncation_keeps_the_last_tokens() -> None:
    assert prompt_ids("abcdef", truncate_prompt_tokens=2) == [101, 102]
    assert prompt_ids("abc", truncate_prompt_tokens=99) == [BOS, 97, 98, 99]
    long = list(range(100))
    # -1: what leaves room for the answer.
    assert prompt_ids(long, truncate_prompt_tokens=-1, max_tokens=10) == long[-22:]
    assert prompt_ids(long, truncate_prompt_tokens=-1, max_tokens=None) == long[-31:]
    assert prompt_ids(long, truncate_prompt_tokens=-1, max_tokens=500) == long[-1:]


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    assert len(prompt_ids([1] * 31)) == 31
    with pytest.raises(ParameterError, match=r"32 tokens and max_model_len is 32"):
        prompt_ids([1] * 32)
    with pytest.raises(ParameterError, match="40 tokens"):
        prompt_ids([1] * 50, truncate_prompt_tokens=40)


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_token_ids_outside_of_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ParameterError, match=f"got {token}") as caught:
        prompt_ids([1, token, 2])
    assert caught.value.field == "prompt_token_ids"


def test_an_empty_prompt_is_refused_but_a_lone_begin_token_is_not() -> None:
    with pytest.raises(ParameterError, match="empty"):
        prompt_ids([])
    assert prompt_ids("") == [BOS]


def test_parameters_are_checked_against_the_model() -> None:
    for params in ({"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": [VOCAB]}, {"logprobs": 21}):
        with pytest.raises(ParameterError):
            prompt_ids("a", **params)
    request, _ = inputs(max_logprobs=30).request("r", parse_prompt("a"), SamplingParams(logprobs=25))
    assert request.params.logprobs == 25


def test_bad_words_reach_the_engine_as_tokens() -> None:
    request, _ = inputs().request("r", parse_prompt("a"), SamplingParams(bad_words=["no"]))
    assert request.params.bad_words_ids == ((110, 111),)


def test_a_priority_without_the_priority_policy_is_refused() -> None:
    with pytest.raises(ParameterError, match="priority"):
        inputs(priorities=False).request("r", parse_prompt("a"), SamplingParams(priority=3))
    request, _ = inputs(priorities=True).request("r", parse_prompt("a"), SamplingParams(priority=3))
    assert request.priority == 3
    request, _ = inputs(priorities=True).request("r", parse_prompt("a"), SamplingParams(priority=3), priority=-1)
    assert request.priority == -1


# -- output


class Run:
    """One request whose tokens the test hands out."""

    def __init__(self, prompt: str = "p", **params: Any) -> None:
        tokenizer = byte_tokenizer()
        self.processor = OutputProcessor(tokenizer)
        self.state = RequestState(
            "r", prompt, tokenizer.encode(prompt), SamplingParams(**params), tokenizer, seed=0, arrival=0.0
        )
        self.processor.add(self.state)
        self.stops: list[tuple[str, int, str]] = []

    def push(self, text: str | Sequence[int], reason: Any = None, *, index: int = 0, **more: Any) -> None:
        """Give a sequence these tokens in one step."""
        ids = list(text.encode()) if isinstance(text, str) else text
        samples = [SampledToken(token, -0.25, 1, []) for token in ids]
        output = SequenceOutput("r", index, samples, reason is not None, reason, **more)
        self.stops += self.processor.process([output]).stops

    def output(self, kind: Any = "cumulative") -> RequestOutput:
        output = self.state.output(self.processor.texts, kind)
        assert output is not None
        return output

    def text(self) -> str:
        return self.output().outputs[0].text


def test_text_never_ends_in_half_a_character() -> None:
    run = Run(max_tokens=10)
    data = "né€😀".encode()
    seen = []
    for byte in data:
        run.push([byte])
        seen.append(run.text())
    assert seen == ["n", "n", "né", "né", "né", "né€", "né€", "né€", "né€", "né€😀"]
    run.push([0xE2], "length")
    assert run.text() == "né€😀\ufffd"


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    run = Run(stop=["END"])
    for character in "go E":
        run.push(character)
    assert run.text() == "go "  # the E may begin the stop string
    run.push("N")
    run.push("Dx")
    completion = run.output().outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("go ", "stop", "END")
    assert run.stops == [("r", 0, "stop")]
    assert completion.token_ids == list(b"go END")
    assert len(run.processor) == 0


def test_a_stop_string_can_be_included() -> None:
    run = Run(stop="END", include_stop_str_in_output=True)
    run.push("go END")
    assert run.text() == "go END"


def test_a_stop_string_held_back_is_shown_when_the_answer_ends_without_it() -> None:
    run = Run(stop=["END"])
    run.push("go EN")
    assert run.text() == "go "
    run.push([], "length")
    completion = run.output().outputs[0]
    assert (completion.text, completion.finish_reason) == ("go EN", "length")


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    run = Run(stop=["b"], min_tokens=2, max_tokens=10)
    run.push("a")
    run.push("b")
    assert run.output().outputs[0].finish_reason is None
    run.push("b")
    completion = run.output().outputs[0]
    assert (completion.text, completion.stop_reason) == ("ab", "b")


def test_a_stop_token_is_in_the_ids_but_its_text_only_when_asked_for() -> None:
    for include, text in ((False, "ab"), (True, "ab!")):
        run = Run(include_stop_str_in_output=include, stop_token_ids=[33])
        run.push("ab")
        run.push("!", "stop", stop_reason=33)
        completion = run.output().outputs[0]
        assert completion.token_ids == list(b"ab!")
        assert (completion.text, completion.stop_reason) == (text, 33)


def test_a_stop_token_does_not_complete_a_stop_string() -> None:
    run = Run(stop=["b!"], stop_token_ids=[33])
    run.push("ab!", "stop", stop_reason=33)
    completion = run.output().outputs[0]
    assert (completion.text, completion.stop_reason) == ("ab", 33)
    assert run.stops == []


def test_a_stop_string_in_the_engines_last_tokens_wins_over_length() -> None:
    run = Run(stop=["b"])
    run.push("abc", "length")
    completion = run.output().outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", "b")
    assert run.stops == []


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    for skip, text in ((True, "ab"), (False, "a<bos>b")):
        run = Run(skip_special_tokens=skip)
        run.push([97, BOS, 98])
        run.push([EOS], "stop")
        assert run.text() == text


def test_deltas_add_up_to_the_cumulative_output() -> None:
    run = Run(max_tokens=50, logprobs=0, stop=["zz"])
    parts: list[RequestOutput] = []
    for step in ("He", "llo €"[:4], "€", "wor", "z", "", "ld"):
        run.push(step)
        if step:
            parts.append(run.output("delta"))
    run.push([EOS], "stop")
    parts.append(run.output("delta"))
    whole = run.output("cumulative").outputs[0]
    pieces = [part.outputs[0] for part in parts if part.outputs]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [entry for piece in pieces for entry in piece.logprobs or ()] == whole.logprobs
    assert parts[-1].finished


def test_a_delta_says_what_is_new_once() -> None:
    run = Run(n=2, temperature=1.0)

    def delta() -> list[tuple[int, str, str | None]] | None:
        output = run.state.output(run.processor.texts, "delta")
        return output and [(each.index, each.text, each.finish_reason) for each in output.outputs]

    assert delta() is None
    run.push("ab", "length", index=0)
    run.push("c", index=1)
    assert delta() == [(0, "ab", "length"), (1, "c", None)]
    assert delta() is None
    run.push("d", index=1)
    assert delta() == [(1, "d", None)]
    run.push("", "stop", index=1)
    assert delta() == [(1, "", "stop")]
    assert delta() is None


def test_logprobs_have_the_token_taken_first_and_ranks() -> None:
    tokenizer = byte_tokenizer()
    processor = OutputProcessor(tokenizer)
    state = RequestState("r", None, [1], SamplingParams(logprobs=2), tokenizer, seed=0, arrival=0.0)
    processor.add(state)
    sample = SampledToken(99, -3.0, 7, [(97, -0.5), (98, -1.0)])
    inside = SampledToken(98, -1.0, 2, [(97, -0.5), (98, -1.0)])
    processor.process([SequenceOutput("r", 0, [sample, inside], True, "length")])
    output = state.output(processor.texts)
    assert output is not None
    (completion,) = output.outputs
    assert completion.logprobs is not None
    first, second = completion.logprobs
    assert [(token, entry.logprob, entry.rank, entry.decoded_token) for token, entry in first.items()] == [
        (99, -3.0, 7, "c"),
        (97, -0.5, 1, "a"),
        (98, -1.0, 2, "b"),
    ]
    assert [(token, entry.rank) for token, entry in second.items()] == [(98, 2), (97, 1)]
    assert completion.cumulative_logprob == -4.0


def test_without_logprobs_there_are_none() -> None:
    run = Run()
    run.push("a", "length")
    assert run.output().outputs[0].logprobs is None
    assert run.output().outputs[0].cumulative_logprob is None


def test_prompt_logprobs_are_one_a_prompt_token_and_none_for_the_first() -> None:
    llm = LLM.from_loaded(load_fake(says("x")))
    (output,) = llm.generate([[97, 98, 99]], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry is not None] == [98, 99]


def test_best_of_returns_the_n_with_the_highest_cumulative_logprob_best_first() -> None:
    run = Run(n=2, best_of=3)
    logprobs = {0: -2.0, 1: -1.0, 2: -1.5}
    for index, logprob in logprobs.items():
        assert run.state.output(run.processor.texts, "cumulative") is None
        sample = SampledToken(97 + index, logprob, 1, [])
        run.processor.process([SequenceOutput("r", index, [sample], True, "length")])
    outputs = run.output().outputs
    assert [(each.index, each.text, each.cumulative_logprob) for each in outputs] == [(0, "b", -1.0), (1, "c", -1.5)]


def test_several_answers_finish_one_after_the_other() -> None:
    run = Run(n=2)
    run.push("a", "length", index=1)
    assert not run.output().finished
    assert [each.finish_reason for each in run.output().outputs] == [None, "length"]
    run.push("b", "length", index=0)
    assert run.output().finished
    assert [each.text for each in run.output().outputs] == ["b", "a"]


def test_a_failed_sequence_ends_its_siblings() -> None:
    run = Run(n=2)
    run.push([], "error", index=1, error="broken")
    assert run.stops == [("r", 0, "error")]
    output = run.output()
    assert output.finished
    assert output.error == "broken"
    assert [each.finish_reason for each in output.outputs] == ["error", "error"]


def test_outputs_of_requests_that_are_gone_are_ignored() -> None:
    run = Run()
    run.processor.remove("r")
    run.push("a")
    assert run.state.num_tokens == 0


def test_a_stop_string_frees_the_sequence_within_its_step() -> None:
    backend = ScriptBackend(says("one. two. three. " * 4))
    llm = LLM.from_loaded(load_fake(backend))
    (output,) = llm.generate("p", SamplingParams(max_tokens=60, stop=["two"]), use_tqdm=False)
    assert output.outputs[0].text == "one. "
    assert backend.steps == len("one. two")
    assert llm._loaded is not None
    assert llm._loaded.engine.stats().referenced_blocks == 0


def test_metrics_tell_when_tokens_came() -> None:
    run = Run()
    run.push("a")
    run.push("b", "length")
    metrics = run.output().metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.first_token_time <= metrics.last_token_time
    assert metrics.finished_time == metrics.last_token_time
    assert metrics.time_to_first_token == metrics.first_token_time
