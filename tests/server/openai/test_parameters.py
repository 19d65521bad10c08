"""The mapping from request fields to SamplingParams, its limits and its words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.errors import ParameterError
from octavo.sampling.params import SamplingParams
from octavo.server.failures import Failure, failure_of
from octavo.server.openai.parameters import (
    check_common,
    check_logprobs,
    number_of_choices,
    priority_of,
    requested_tokens,
    sampling_params,
)
from octavo.server.openai.schemas_chat import ChatRequest
from octavo.server.openai.schemas_completions import CompletionRequest


def request(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "a", **fields}, CompletionRequest)


def mapped(defaults: SamplingParams | None = None, **fields: Any) -> SamplingParams:
    return sampling_params(
        request(**fields), defaults or SamplingParams(), n=fields.get("n", 1), max_tokens=16, logprobs=None,
        prompt_logprobs=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.25),
        ("top_k", 7),
        ("min_p", 0.125),
        ("typical_p", 0.5),
        ("presence_penalty", -1.5),
        ("frequency_penalty", 1.5),
        ("repetition_penalty", 1.25),
        ("seed", 42),
        ("stop", ("one", "two")),
        ("stop_token_ids", (3, 4)),
        ("include_stop_str_in_output", True),
        ("ignore_eos", True),
        ("min_tokens", 3),
        ("bad_words", ("no",)),
        ("allowed_token_ids", (5, 6)),
        ("skip_special_tokens", False),
        ("watermark", True),
    ],
)
def test_a_field_reaches_the_engine_under_its_own_name(field: str, value: Any) -> None:
    given = list(value) if isinstance(value, tuple) else value
    assert getattr(mapped(**{field: given}), field) == value


def test_logit_bias_has_ids_as_strings_and_is_clamped_as_vllm_does() -> None:
    assert mapped(logit_bias={"3": 1.5, "4": -500.0}).logit_bias == {3: 1.5, 4: -100.0}


def test_what_a_request_leaves_open_comes_from_the_generation_config() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    params = mapped(defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 20)
    assert (params.min_p, params.repetition_penalty) == (0.1, 1.1)


def test_what_a_request_says_wins_over_the_generation_config() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20)
    params = mapped(defaults, temperature=1.0, top_k=-1)
    assert (params.temperature, params.top_k) == (1.0, -1)


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in CompletionRequest.__struct_fields__ if name not in ("prompt",)]
    assert msgspec.convert({"prompt": "a", **dict.fromkeys(names)}, CompletionRequest) == request()
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    assert msgspec.convert({**chat, **dict.fromkeys(names)}, ChatRequest) == msgspec.convert(chat, ChatRequest)


def refused(*, max_logprobs: int = 20, **fields: Any) -> Failure:
    with pytest.raises((Failure, ParameterError)) as caught:
        check_common(request(**fields), max_logprobs=max_logprobs)
    failure = failure_of(caught.value)
    assert failure.status == 400
    return failure


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "right"}, "truncation_side"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "two words"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_a_value_out_of_bounds_is_refused_naming_the_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize("temperature", [0, 2, 2.0])
def test_the_bounds_of_temperature_are_allowed(temperature: float) -> None:
    check_common(request(temperature=temperature), max_logprobs=20)


def test_too_many_logprobs_are_refused_in_vllms_words() -> None:
    with pytest.raises(Failure, match="Requested sample logprobs of 21, which is greater than max allowed: 20"):
        check_logprobs("logprobs", 21, 20)
    assert (
        "Requested prompt logprobs of 21, which is greater than max allowed: 20" in refused(prompt_logprobs=21).message
    )


def test_several_greedy_choices_are_refused_in_vllms_words() -> None:
    with pytest.raises(Failure, match="n must be 1 when using greedy sampling") as caught:
        mapped(n=2, temperature=0)
    assert caught.value.param == "n"


def test_choices_of_all_prompts_together_are_bounded() -> None:
    assert number_of_choices(request(n=16384)) == 16384
    with pytest.raises(ParameterError, match="n must be at most 16 with 1024 prompts"):
        number_of_choices(request(n=17), prompts=1024)
    with pytest.raises(ParameterError, match="n must be"):
        number_of_choices(request(n=0))
    with pytest.raises(ParameterError, match="best_of"):
        number_of_choices(request(n=3), best_of=2)


def test_the_priority_header_wins_over_the_field() -> None:
    assert priority_of(request(priority=3), None) == 3
    assert priority_of(request(priority=3), "-7") == -7
    with pytest.raises(ParameterError, match="X-Vllm-Priority"):
        priority_of(request(), "soon")


def test_an_answer_has_one_token_at_least() -> None:
    with pytest.raises(ParameterError, match="max_completion_tokens must be at least 1, got 0"):
        requested_tokens("max_completion_tokens", 0)
    assert requested_tokens("max_tokens", 0, least=0) == 0
    assert requested_tokens("max_tokens", None) is None
