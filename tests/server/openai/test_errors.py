"""The reference's table of errors, one test a row of what is built: status, type, param and text as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from octavo.errors import GenerationError
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.output_processor import RequestState
from tests.frontend.fakes import ScriptBackend, load_fake, says
from tests.server.openai.scripted import CONTEXT, events, refusal, scripted_server
from tests.server.running import RunningServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": [{"role": "user", "content": "say:hi"}], **fields})


def text(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(TEXT, json={"prompt": "say:hi", **fields})


BOTH = pytest.mark.parametrize("ask", [chat, text])


# -- the model


@BOTH
def test_an_unknown_model_is_404(http: httpx.Client, ask: Any) -> None:
    error = refusal(ask(http, model="nobody/nothing"), 404)
    assert error["message"] == "The model `nobody/nothing` does not exist."
    assert (error["type"], error["param"]) == ("NotFoundError", "model")


@BOTH
def test_an_absent_model_is_fine(http: httpx.Client, ask: Any) -> None:
    assert ask(http).json()["model"] == "scripted"
    assert ask(http, model=None).json()["model"] == "scripted"


def test_the_openai_client_sees_its_own_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.body == {
        "message": "The model `other` does not exist.", "type": "NotFoundError", "param": "model", "code": 404,
    }  # fmt: skip
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="scripted", prompt="a", temperature=3)
    assert (wrong.value.type, wrong.value.param, wrong.value.code) == ("BadRequestError", "temperature", "400")


# -- the prompt


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chat_too_long_for_its_answer_is_refused_with_the_three_numbers(http: httpx.Client, field: str) -> None:
    used = chat(http).json()["usage"]["prompt_tokens"]
    assert chat(http, **{field: CONTEXT - used}).status_code == 200
    error = refusal(chat(http, **{field: CONTEXT}))
    assert error["message"] == (
        f"This model's maximum context length is {CONTEXT} tokens. However, you requested {CONTEXT} output tokens and "
        f"your prompt contains {used} input tokens, for a total of {CONTEXT + used} tokens. Please reduce the length "
        "of the input prompt or the number of requested output tokens."
    )
    assert (error["type"], error["param"]) == ("BadRequestError", "input_tokens")


def test_a_prompt_too_long_by_itself_is_refused_with_the_three_numbers(http: httpx.Client) -> None:
    for answer in (
        text(http, prompt="a" * CONTEXT, max_tokens=5),
        text(http, prompt=["ok", "a" * CONTEXT], max_tokens=5),
        text(http, prompt=[97] * (CONTEXT + 1), max_tokens=5),
        chat(http, messages=[{"role": "user", "content": "a" * CONTEXT}]),
    ):
        error = refusal(answer)
        assert f"maximum context length is {CONTEXT} tokens" in error["message"]
        assert error["param"] == "input_tokens"


@pytest.mark.parametrize("wrong", [260, -1, 10**9])
def test_a_prompt_id_outside_the_vocabulary_is_refused(http: httpx.Client, wrong: int) -> None:
    error = refusal(text(http, prompt=[97, wrong]))
    assert error["message"].startswith(f"Token id {wrong} is out of vocabulary")
    assert error["param"] == "prompt"


# -- the body


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b'{"model": "a",}', b"nonsense"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_body_that_is_not_json_is_a_bad_request(http: httpx.Client, path: str, body: bytes) -> None:
    error = refusal(http.post(path, content=body, headers={"content-type": "application/json"}))
    assert (error["type"], error["param"]) == ("Bad Request", "body")
    assert error["message"].startswith("1 validation error: ")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "a", "max_tokens": "ten"}, "body.max_tokens"),
        (TEXT, {"prompt": {"text": "a"}}, "body.prompt"),
        (TEXT, {"prompt": "a", "stop": [1]}, "body.stop[0]"),
        (TEXT, {"prompt": "a", "temperature": "hot"}, "body.temperature"),
        (TEXT, {"prompt": "a", "stream": "yes"}, "body.stream"),
        (TEXT, [], "body"),
        (CHAT, {"messages": "hi"}, "body.messages"),
        (CHAT, {"messages": [{"content": "hi"}]}, "body.messages[0].role"),
        (CHAT, {}, "body.messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "stream_options": 1}, "body.stream_options"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "huge"}, "body.reasoning_effort"),
    ],
)
def test_a_field_of_a_wrong_type_is_a_bad_request(http: httpx.Client, path: str, body: Any, param: str) -> None:
    error = refusal(http.post(path, json=body))
    assert (error["type"], error["param"]) == ("Bad Request", param)
    assert error["message"].startswith("1 validation error: ")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_another_content_type_is_a_bad_request(http: httpx.Client, path: str) -> None:
    error = refusal(http.post(path, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}))
    assert (error["type"], error["param"]) == ("Bad Request", "body")
    assert "application/json" in error["message"]


@BOTH
@pytest.mark.parametrize("field", ["frobnicate", "guided_json", "best_off", "regex"])
def test_an_unknown_field_is_refused_by_name(http: httpx.Client, ask: Any, field: str) -> None:
    error = refusal(ask(http, **{field: 1}))
    assert error["param"] == field
    assert error["type"] == "BadRequestError"
    assert field in error["message"]


def test_an_unknown_field_inside_another_is_refused_by_its_path(http: httpx.Client) -> None:
    assert refusal(text(http, stream=True, stream_options={"colour": 1}))["param"] == "stream_options.colour"
    assert refusal(chat(http, messages=[{"role": "user", "content": "a", "mood": 1}]))["param"] == "messages[0].mood"


# -- the limits


@BOTH
@pytest.mark.parametrize("value", [0, -1])
def test_max_tokens_below_1_is_refused(http: httpx.Client, ask: Any, value: int) -> None:
    error = refusal(ask(http, max_tokens=value))
    assert error["param"] == "max_tokens"
    assert error["message"] == f"max_tokens must be at least 1, got {value}"


def test_max_tokens_0_is_for_completions_with_echo(http: httpx.Client) -> None:
    assert text(http, max_tokens=0, echo=True).status_code == 200
    assert refusal(text(http, max_tokens=-1, echo=True))["param"] == "max_tokens"
    assert refusal(chat(http, max_tokens=0, echo=True))["param"] == "max_tokens"
    assert refusal(chat(http, max_completion_tokens=0))["param"] == "max_completion_tokens"


@BOTH
@pytest.mark.parametrize("value", [-0.5, 2.5])
def test_temperature_out_of_0_to_2_is_refused(http: httpx.Client, ask: Any, value: float) -> None:
    assert refusal(ask(http, temperature=value))["param"] == "temperature"


@BOTH
def test_n_above_1_with_greedy_is_refused(http: httpx.Client, ask: Any) -> None:
    error = refusal(ask(http, n=2, temperature=0))
    assert "n must be 1 when using greedy sampling" in error["message"]
    assert error["param"] == "n"


def test_logprobs_over_the_limit_are_refused(http: httpx.Client) -> None:
    error = refusal(text(http, logprobs=21))
    assert error["message"] == "Requested sample logprobs of 21, which is greater than max allowed: 20"
    assert error["param"] == "logprobs"
    error = refusal(chat(http, logprobs=True, top_logprobs=21))
    assert error["message"] == "Requested sample logprobs of 21, which is greater than max allowed: 20"
    assert error["param"] == "top_logprobs"


def test_top_logprobs_without_logprobs_are_refused(http: httpx.Client) -> None:
    error = refusal(chat(http, top_logprobs=2))
    assert error["message"] == "when using `top_logprobs`, `logprobs` must be set to true."
    assert error["param"] == "top_logprobs"
    assert chat(http, top_logprobs=0).status_code == 200


@BOTH
def test_prompt_logprobs_in_a_stream_are_refused(http: httpx.Client, ask: Any) -> None:
    error = refusal(ask(http, prompt_logprobs=1, stream=True))
    assert error["message"] == "`prompt_logprobs` are not available when `stream=True`."
    assert error["param"] == "prompt_logprobs"


@BOTH
def test_stream_options_without_a_stream_are_refused(http: httpx.Client, ask: Any) -> None:
    error = refusal(ask(http, stream_options={"include_usage": True}))
    assert error["message"] == "Stream options can only be defined when `stream=True`."
    assert error["param"] == "stream_options"


@BOTH
def test_a_priority_needs_the_policy(http: httpx.Client, ask: Any) -> None:
    error = refusal(ask(http, priority=1))
    assert error["param"] == "priority"
    assert "scheduling_policy" in error["message"]
    assert ask(http, priority=0).status_code == 200


@BOTH
@pytest.mark.parametrize("wrong", [260, 10**9])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", lambda wrong: {str(wrong): 1}),
        ("allowed_token_ids", lambda wrong: [97, wrong]),
        ("stop_token_ids", lambda wrong: [wrong]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    http: httpx.Client, ask: Any, field: str, value: Any, wrong: int
) -> None:
    error = refusal(ask(http, **{field: value(wrong)}, min_tokens=2, max_tokens=4))
    assert error["param"] == field
    assert str(wrong) in error["message"]


@BOTH
@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"-1": 1}}, {"logit_bias": {"a": 1}}, {"allowed_token_ids": [-1]}, {"stop_token_ids": [-1]}],
)
def test_ids_that_cannot_be_are_refused(http: httpx.Client, ask: Any, fields: dict[str, Any]) -> None:
    assert refusal(ask(http, **fields))["param"] == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"title": "a", "text": "b"}]}, "documents"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"n": 0}, "n"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"typical_p": 0}, "typical_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ],
)
def test_what_is_not_built_or_out_of_bounds_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = refusal(chat(http, **fields))
    assert (error["type"], error["param"]) == ("BadRequestError", param)


def test_neutral_values_of_what_is_not_built_are_accepted(http: httpx.Client) -> None:
    answer = chat(
        http,
        tools=None,
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        use_beam_search=False,
        length_penalty=1.0,
        service_tier="auto",
        store=False,
        user="somebody",
        metadata={"a": "b"},
        repetition_penalty=1.0,
        logit_bias={},
        stop=[],
        stop_token_ids=[],
        bad_words=[],
        chat_template_kwargs={},
        spaces_between_special_tokens=True,
        include_reasoning=True,
    )
    assert answer.json()["choices"][0]["message"]["content"] == "hi"
    assert text(http, suffix=None, prompt_embeds=None, logprobs=None, best_of=1, echo=False).status_code == 200


def test_more_prompts_than_the_limit_are_refused(http: httpx.Client) -> None:
    error = refusal(text(http, prompt=["a"] * 1025))
    assert error["param"] == "prompt"
    assert "1024" in error["message"]


# -- the way


def test_an_unknown_path_and_method_have_the_nested_shape(http: httpx.Client) -> None:
    assert refusal(http.get("/v1/nothing"), 404)["type"] == "NotFoundError"
    assert refusal(http.get(CHAT), 405)["type"] == "MethodNotAllowedError"
    assert http.get(CHAT).headers["allow"]


def test_a_body_too_large_is_413_in_the_nested_shape() -> None:
    with scripted_server(max_body_bytes=1000) as server, server.client() as http:
        error = refusal(text(http, prompt="a" * 2000), 413)
        assert "1000 bytes" in error["message"]


def test_a_wrong_key_is_401_in_the_nested_shape() -> None:
    with scripted_server(api_key="secret") as server, server.client() as http:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = http.post(TEXT, json={"prompt": "a"}, headers=headers)
            assert refusal(answer, 401)["type"] == "AuthenticationError"
            assert answer.headers["www-authenticate"] == "Bearer"
        with (
            pytest.raises(openai.AuthenticationError),
            OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        ):
            client.models.list()
        with OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            assert client.models.list().data[0].id == "scripted"


def test_one_request_too_many_is_429_with_a_time_to_wait() -> None:
    with (
        scripted_server(max_concurrent_requests=1, step=0.01) as server,
        server.client() as http,
        http.stream("POST", TEXT, json={"prompt": "go", "max_tokens": 400, "stream": True}) as first,
    ):
        lines = first.iter_lines()  # kept, as the stream is closed with its iterator
        next(lines)
        answer = text(http)
        assert refusal(answer, 429)["type"] == "RateLimitError"
        assert int(answer.headers["retry-after"]) >= 1


# -- in the midst of a stream


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server whose generations fail at their third output; a step takes long enough to send each token by itself."""
    produce = RequestState.output
    calls = []

    def fail_at_third(state: RequestState, *arguments: Any) -> Any:
        calls.append(state)
        if len(calls) == 3:
            raise GenerationError("the logits are not finite")
        return produce(state, *arguments)

    monkeypatch.setattr(RequestState, "output", fail_at_third)
    with scripted_server(step=0.02) as server:
        yield server


@BOTH
def test_an_error_in_a_stream_is_an_event_and_the_end_is_marked(failing: RunningServer, ask: Any) -> None:
    """The status line has gone out by then: HTTP stays 200."""
    with failing.client() as http:
        found = events(ask(http, stream=True, max_tokens=20, ignore_eos=True))
    assert "choices" in found[0]
    assert found[-1] == {
        "error": {"message": "the logits are not finite", "type": "InternalServerError", "param": None, "code": 500}
    }


def test_the_openai_client_raises_on_an_error_in_a_stream(failing: RunningServer) -> None:
    with OpenAI(base_url=f"{failing.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="scripted", prompt="go", max_tokens=20, stream=True)
        with pytest.raises(openai.APIError, match="the logits are not finite"):
            for _ in stream:
                pass


@BOTH
def test_an_error_before_the_first_token_of_a_stream_has_its_own_status(http: httpx.Client, ask: Any) -> None:
    assert refusal(ask(http, stream=True, stop_token_ids=[260]))["param"] == "stop_token_ids"


def test_a_request_larger_than_the_whole_cache_is_refused_at_once() -> None:
    """CPU-10's first half: the prompt fits the context but not the blocks there are."""
    with (
        closing(AsyncLLM.from_loaded(load_fake(ScriptBackend(says("ok"), num_blocks=4, max_model_len=CONTEXT)))) as llm,
        RunningServer(llm=llm, served_model_name="small") as server,
        server.client() as http,
    ):
        error = refusal(text(http, prompt="a" * 100, max_tokens=2))
        assert "blocks" in error["message"]
        assert text(http, prompt="a", max_tokens=2).status_code == 200


def test_a_text_of_too_many_characters_is_refused_before_it_is_read(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "word " * 200_000, "max_tokens": 2})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "input_text"
    assert "at least" in error["message"]
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "word " * 200_000}]})
    assert chat.json()["error"]["param"] == "input_text"
    kept = {"prompt": "word " * 50_000, "max_tokens": 2, "truncate_prompt_tokens": 5}
    assert http.post("/v1/completions", json=kept).status_code == 200
