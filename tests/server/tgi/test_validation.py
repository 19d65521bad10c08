"""TGI's rules and texts; the cases of its router's own validation tests are among them, in other words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.server.failures import Failure, Kind
from octavo.server.tgi.schemas import GenerateRequest, Parameters
from octavo.server.tgi.validation import Asked, Limits, validate

LIMITS = Limits(max_input_tokens=100, max_total_tokens=106, max_best_of=2, max_stop_sequences=3, max_top_n_tokens=4)


def ask(parameters: dict[str, Any] | None, *, inputs: str = "Hello", limits: Limits = LIMITS, **route: Any) -> Asked:
    body: dict[str, Any] = {"inputs": inputs}
    if parameters is not None:
        body["parameters"] = parameters
    return validate(msgspec.convert(body, GenerateRequest), limits, **route)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 0}, "`best_of` must be > 0 and <= 2. Given: 0"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"temperature": 0.0}, "`temperature` must be strictly positive"),
        ({"temperature": -1}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_k": -1}, "`top_k` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"stop": ["a", "b", "c", "d"]}, "`stop` supports up to 3 stop sequences. Given: 4"),
        ({"top_n_tokens": 5}, "`top_n_tokens` must be >= 0 and <= 4. Given: 5"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 100. Given: 0"),
        ({"truncate": 101}, "`truncate` must be strictly positive and less than 100. Given: 101"),
        ({"seed": 1 << 64}, "`seed` must be <= 18446744073709551615. Given: 18446744073709551616"),
        ({"grammar": {"type": "regex", "value": "a+"}}, "grammar is not supported"),
        ({"adapter_id": "mine"}, "`adapter_id` is not supported: no adapters are loaded. Given: mine"),
    ],
)
def test_a_broken_rule_is_named_in_tgis_words(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(Failure) as raised:
        ask(parameters)
    assert raised.value.message == message
    assert raised.value.kind is Kind.invalid
    assert raised.value.param is not None


def test_an_empty_input_is_refused() -> None:
    with pytest.raises(Failure, match="`inputs` cannot be empty"):
        ask({}, inputs="")


def test_a_server_without_best_of_says_so() -> None:
    with pytest.raises(Failure, match="`best_of` != 1 is not allowed for this endpoint"):
        ask({"best_of": 2, "do_sample": True}, limits=Limits(max_input_tokens=5, max_total_tokens=6, max_best_of=1))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
def test_a_stream_has_one_sequence_and_no_prefill(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(Failure, match=message):
        ask(parameters, streaming=True)
    ask(parameters)


def test_top_p_is_open_at_both_ends_for_clients_and_one_inside() -> None:
    assert ask({"top_p": 0.99}).top_p == 0.99
    assert ask({"top_p": None}).top_p == 1.0


@pytest.mark.parametrize("given", [None, 0, 4])
def test_top_n_tokens_goes_from_none_to_the_limit(given: int | None) -> None:
    assert ask({"top_n_tokens": given}).top_n == (given or 0)


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        (None, True),
        ({}, False),
        ({"do_sample": False}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.7}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.5}, True),
        ({"typical_p": 0.5}, True),
        ({"seed": 3}, False),
        ({"best_of": 2, "temperature": 1.0}, True),
    ],
)
def test_what_is_drawn_and_what_is_greedy(parameters: dict[str, Any] | None, sampling: bool) -> None:
    asked = ask(parameters)
    assert asked.sampling is sampling
    assert asked.sampling_params(5, asked.draw_seed(), logprobs=False).greedy is not sampling
    assert (asked.draw_seed() is not None) is sampling


def test_a_given_seed_is_used_and_others_differ() -> None:
    assert ask({"do_sample": True, "seed": 0}).draw_seed() == 0
    asked = ask({"do_sample": True})
    assert asked.draw_seed() != asked.draw_seed()


def test_each_parameter_reaches_the_engine() -> None:
    params = ask(
        {
            "temperature": 0.5,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.1,
            "top_k": 10,
            "top_p": 0.9,
            "typical_p": 0.8,
            "stop": ["x", "y"],
            "watermark": True,
            "decoder_input_details": True,
            "top_n_tokens": 3,
        }
    ).sampling_params(7, 5, logprobs=True)
    assert (params.temperature, params.repetition_penalty, params.frequency_penalty) == (0.5, 1.2, 0.1)
    assert (params.top_k, params.top_p, params.typical_p, params.seed, params.max_tokens) == (10, 0.9, 0.8, 5, 7)
    assert params.stop_strings == ("x", "y")
    assert params.include_stop_str_in_output
    assert params.watermark
    assert (params.logprobs, params.prompt_logprobs, params.logprobs_mode) == (3, 0, "processed")


def test_log_probabilities_are_computed_only_where_somebody_reads_them() -> None:
    params = ask({"top_n_tokens": 3}).sampling_params(7, None, logprobs=False)
    assert (params.logprobs, params.prompt_logprobs) == (None, None)


def test_the_full_text_is_returned_as_the_route_or_the_request_says() -> None:
    assert not ask({}).return_full_text
    assert ask({}, return_full_text=True).return_full_text
    assert not ask({"return_full_text": False}, return_full_text=True).return_full_text
    assert ask({"return_full_text": True}).return_full_text


SMALL = Limits(max_input_tokens=5, max_total_tokens=6)


def test_input_and_answer_have_to_fit_together() -> None:
    with pytest.raises(Failure) as raised:
        ask({"max_new_tokens": 10}).fit([1], SMALL)
    assert raised.value.message == (
        "`inputs` tokens + `max_new_tokens` must be <= 6. Given: 1 `inputs` tokens and 10 `max_new_tokens`"
    )
    assert raised.value.code == "context_length_exceeded"


def test_an_input_that_is_too_long_is_refused_with_the_numbers() -> None:
    with pytest.raises(Failure, match=r"`inputs` must have less than 5 tokens\. Given: 6"):
        ask({}).fit([1] * 6, SMALL)


def test_without_a_number_the_answer_may_fill_the_context() -> None:
    assert ask({}).fit([1, 2], SMALL) == ([1, 2], 4)
    assert ask({"max_new_tokens": 3}).fit([1, 2], SMALL) == ([1, 2], 3)


def test_truncation_keeps_the_last_tokens() -> None:
    assert ask({"truncate": 3}).fit([1, 2, 3, 4, 5, 6, 7], SMALL) == ([5, 6, 7], 3)
    assert ask({"truncate": 5}).fit([1, 2], SMALL) == ([1, 2], 4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "inputs"),
        ({"inputs": 3}, "inputs"),
        ({"inputs": ["a"]}, "inputs"),
        ({"inputs": "a", "surplus": 1}, "surplus"),
        ({"inputs": "a", "parameters": {"surplus": 1}}, "surplus"),
        ({"inputs": "a", "parameters": {"seed": -1}}, "seed"),
        ({"inputs": "a", "parameters": {"top_p": "0.9"}}, "top_p"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 1.5}}, "max_new_tokens"),
    ],
)
def test_a_body_of_another_shape_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(msgspec.json.encode(body), type=GenerateRequest)


def test_null_is_absent_for_every_parameter() -> None:
    nothing = dict.fromkeys(Parameters.__struct_fields__)
    assert ask(nothing) == ask({})
