"""TGI's routes over HTTP on the real model: answers, events, headers, and refusals as clients see them."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]


def post(server: RunningServer, path: str, body: Any, **more: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(path, json=body, **more)


def generate(server: RunningServer, inputs: str = PROMPT, **parameters: Any) -> dict[str, Any]:
    response = post(server, "/generate", {"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(text: str) -> list[dict[str, Any]]:
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: {") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def stream(server: RunningServer, path: str = "/generate_stream", inputs: str = PROMPT, **parameters: Any) -> list[Any]:
    body: dict[str, Any] = {"inputs": inputs, "parameters": parameters, "stream": True}
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    return events(response.text)


# -- answers


def test_generate_answers_with_one_object_and_the_headers_of_tgi(server: RunningServer) -> None:
    response = post(server, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}})
    assert response.json() == {"generated_text": " Paris.\n"}
    headers = response.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "cpu+optimized"
    assert headers["x-compute-characters"] == str(len(PROMPT))
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("5", "3")
    assert float(headers["x-compute-time"]) > 0
    times = {name: int(headers[f"x-{name}-time"]) for name in ("total", "validation", "queue", "inference")}
    assert min(times.values()) >= 0
    assert times["total"] >= times["inference"]
    assert int(headers["x-time-per-token"]) <= times["inference"]


def test_the_root_answers_with_an_array_and_the_full_text(server: RunningServer) -> None:
    parameters = {"max_new_tokens": 1}
    assert post(server, "/", {"inputs": PROMPT, "parameters": parameters}).json() == [
        {"generated_text": PROMPT + " Paris"}
    ]
    parameters["return_full_text"] = False
    assert post(server, "/", {"inputs": PROMPT, "parameters": parameters}).json() == [{"generated_text": " Paris"}]
    assert stream(server, "/", max_new_tokens=1)[-1]["generated_text"] == PROMPT + " Paris"


def test_details_say_what_was_generated(server: RunningServer) -> None:
    answer = generate(server, max_new_tokens=6, details=True)
    details = answer["details"]
    assert set(details) == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 6, None)
    assert details["prefill"] == []
    assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]
    assert all(token["logprob"] < 0 for token in details["tokens"])


def test_prefill_has_the_log_probabilities_of_the_prompt(server: RunningServer) -> None:
    details = generate(server, max_new_tokens=2, decoder_input_details=True)["details"]
    prefill = details["prefill"]
    assert [token["text"] for token in prefill] == ["The", " capital", " of", " France", " is"]
    assert prefill[0]["logprob"] is None
    # The same tokens as an answer: what was generated for a prefix has the log-probability it has in a prompt.
    whole = generate(server, PROMPT + " Paris.", max_new_tokens=1, decoder_input_details=True)["details"]["prefill"]
    assert [token["id"] for token in whole[5:]] == [token["id"] for token in details["tokens"]]
    for generated, prompted in zip(details["tokens"], whole[5:], strict=True):
        assert generated["logprob"] == pytest.approx(prompted["logprob"], abs=1e-3)


def test_the_most_likely_tokens_are_listed_at_each_place(server: RunningServer) -> None:
    details = generate(server, max_new_tokens=4, details=True, top_n_tokens=3)["details"]
    assert [len(top) for top in details["top_tokens"]] == [3] * 4
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert top[0] == token  # greedy
        assert [entry["logprob"] for entry in top] == sorted((entry["logprob"] for entry in top), reverse=True)


def test_log_probabilities_are_those_after_warping(server: RunningServer) -> None:
    details = generate(server, max_new_tokens=5, details=True, top_k=1, top_n_tokens=5)["details"]
    assert [token["logprob"] for token in details["tokens"]] == [0.0] * 5
    assert [len(top) for top in details["top_tokens"]] == [1] * 5
    two = generate(server, max_new_tokens=1, details=True, top_k=2, temperature=0.5, top_n_tokens=5)["details"]
    assert sum(math.exp(entry["logprob"]) for entry in two["top_tokens"][0]) == pytest.approx(1, abs=1e-4)


def test_the_last_tokens_are_kept_when_an_input_is_truncated(server: RunningServer) -> None:
    cut = generate(server, "Some words before. " + PROMPT, truncate=5, max_new_tokens=3, decoder_input_details=True)
    assert [token["text"] for token in cut["details"]["prefill"]] == [" The", " capital", " of", " France", " is"]
    assert post(
        server, "/generate", {"inputs": PROMPT, "parameters": {"truncate": 3, "max_new_tokens": 1}}
    ).headers["x-prompt-tokens"] == "3"  # fmt: skip


def test_a_stop_sequence_stays_in_the_text_and_ends_it_inside_of_a_token(server: RunningServer) -> None:
    answer = generate(server, max_new_tokens=20, stop=["Pari"], details=True)
    assert answer["generated_text"] == " Pari"
    assert answer["details"]["finish_reason"] == "stop_sequence"
    (event,) = stream(server, max_new_tokens=20, stop=["Pari"], details=True)
    assert event["generated_text"] == event["token"]["text"] == " Pari"


def test_an_end_token_is_listed_and_not_in_the_text(server: RunningServer) -> None:
    inputs = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    answer = generate(server, inputs, max_new_tokens=64, details=True)
    details = answer["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["tokens"][-1]["special"]
    assert details["tokens"][-1]["text"] == "<|im_end|>"
    assert details["generated_tokens"] == len(details["tokens"]) < 64
    assert "<|im_end|>" not in answer["generated_text"]


def test_without_parameters_tokens_are_drawn_and_with_some_they_are_not(server: RunningServer) -> None:
    many = "Write one word:"
    bodies = [{"inputs": many, "parameters": {"max_new_tokens": 12}} for _ in range(3)]
    assert len({post(server, "/generate", body).json()["generated_text"] for body in bodies}) == 1
    drawn = {generate(server, many, do_sample=True, max_new_tokens=12)["generated_text"] for _ in range(4)}
    assert len(drawn) > 1


def test_a_seed_is_told_when_tokens_are_drawn_and_gives_them_again(server: RunningServer) -> None:
    first = generate(server, max_new_tokens=8, details=True, do_sample=True)
    seed = first["details"]["seed"]
    assert isinstance(seed, int)
    assert generate(server, max_new_tokens=8, details=True, do_sample=True, seed=seed) == first
    last = stream(server, max_new_tokens=8, details=True, do_sample=True, seed=seed)[-1]
    assert last["generated_text"] == first["generated_text"]
    assert last["details"]["seed"] == seed
    assert generate(server, max_new_tokens=1, details=True, seed=7)["details"]["seed"] is None


def test_best_of_returns_the_likeliest_and_lists_the_other(server: RunningServer) -> None:
    answer = generate(server, max_new_tokens=6, best_of=2, do_sample=True, details=True, decoder_input_details=True)
    details = answer["details"]
    (other,) = details["best_of_sequences"]
    assert set(other) == {"generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"}

    def mean(tokens: list[dict[str, Any]]) -> float:
        return sum(token["logprob"] for token in tokens) / len(tokens)

    assert mean(details["tokens"]) >= mean(other["tokens"])
    assert details["seed"] != other["seed"]
    assert other["prefill"] == details["prefill"]
    assert generate(server, max_new_tokens=6, best_of=2, temperature=0.8).keys() == {"generated_text"}


def test_a_watermark_and_typical_sampling_change_what_is_drawn(server: RunningServer) -> None:
    shared = {"max_new_tokens": 24, "do_sample": True, "seed": 3}
    plain = generate(server, **shared)
    assert generate(server, watermark=True, **shared) != plain
    assert generate(server, typical_p=0.2, **shared) != plain
    assert generate(server, watermark=False, **shared) == plain


def test_equal_greedy_requests_at_once_get_equal_texts(server: RunningServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: generate(server, max_new_tokens=16, details=True), range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["details"]["generated_tokens"] == 16


# -- events


def test_a_stream_has_one_event_a_token_and_no_end_mark(server: RunningServer) -> None:
    got = stream(server, max_new_tokens=6, details=True, top_n_tokens=2)
    whole = generate(server, max_new_tokens=6, details=True, top_n_tokens=2)
    assert [event["index"] for event in got] == [1, 2, 3, 4, 5, 6]
    assert [event["token"] for event in got] == whole["details"]["tokens"]
    assert [event["top_tokens"] for event in got] == whole["details"]["top_tokens"]
    assert [event["generated_text"] for event in got] == [None] * 5 + [whole["generated_text"]]
    assert got[-1]["details"] == {"finish_reason": "length", "generated_tokens": 6, "seed": None, "input_length": 5}
    assert set(stream(server, max_new_tokens=1)[0]) == {"index", "token", "generated_text", "details"}


def test_a_stream_is_not_to_be_buffered_and_says_what_computes(server: RunningServer) -> None:
    response = post(server, "/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-type"] == "cpu+optimized"
    assert response.headers["x-compute-characters"] == str(len(PROMPT))


@pytest.mark.parametrize("inputs", ["Some emoji: 🙂🙃🤖", "日本の首都は", "Ça a été très"])
def test_the_texts_of_tokens_add_up_to_the_generated_text(server: RunningServer, inputs: str) -> None:
    got = stream(server, inputs=inputs, max_new_tokens=24, do_sample=True, seed=11, temperature=1.5)
    text = "".join(event["token"]["text"] for event in got if not event["token"]["special"])
    assert text == got[-1]["generated_text"]
    assert (
        text == generate(server, inputs, max_new_tokens=24, do_sample=True, seed=11, temperature=1.5)["generated_text"]
    )


# -- refusals


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
        ({"truncate": 2048}, "`truncate` must be strictly positive and less than 2047. Given: 2048"),
        ({"grammar": {"type": "json", "value": {"properties": {}}}}, "grammar is not supported"),
        (
            {"max_new_tokens": 10_000},
            "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 5 `inputs` tokens and 10000 `max_new_tokens`",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/invocations"])
def test_a_broken_rule_is_a_422_on_every_route(
    server: RunningServer, path: str, parameters: dict[str, Any], error: str
) -> None:
    body = {"inputs": PROMPT, "parameters": parameters}
    if path == "/generate_stream" and "best_of" in parameters:
        error = "`best_of` != 1 is not supported when streaming tokens"
    response = post(server, path, body)
    assert response.status_code == 422
    assert response.json() == {"error": f"Input validation error: {error}", "error_type": "validation"}


def test_an_input_over_the_limit_is_refused_with_the_numbers_and_the_next_is_served(server: RunningServer) -> None:
    response = post(server, "/generate", {"inputs": " a" * 2100})
    assert response.status_code == 422
    assert response.json()["error"] == "Input validation error: `inputs` must have less than 2047 tokens. Given: 2100"
    assert generate(server, max_new_tokens=1)["generated_text"] == " Paris"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "JSON"),
        (b"[]", "array"),
        (b'{"parameters": {}}', "inputs"),
        (b'{"inputs": ""}', "`inputs` cannot be empty"),
        (b'{"inputs": "a", "parameters": {"surplus": 1}}', "surplus"),
        (b'{"inputs": "a", "parameters": {"stop": [""]}}', "stop"),
        (b'{"inputs": "a", "parameters": {"seed": 1.5}}', "seed"),
    ],
)
def test_a_malformed_body_is_a_422_that_names_the_field(server: RunningServer, body: bytes, said: str) -> None:
    with server.client() as client:
        response = client.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert said in response.json()["error"]


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/invocations", "/tokenize", "/vertex"])
def test_a_body_nested_deeper_than_can_be_read_is_the_clients_fault_on_every_route(
    server: RunningServer, path: str
) -> None:
    with server.client() as client:
        for name in (b"inputs", b"prompt"):
            content = b'{"%b":' % name + b"[" * 20_000 + b"]" * 20_000 + b"}"
            response = client.post(path, content=content, headers={"Content-Type": "application/json"})
            assert 400 <= response.status_code < 500, response.text


def test_stream_says_on_each_route_what_it_means(server: RunningServer) -> None:
    assert post(server, "/generate", {"inputs": "a", "stream": True}).status_code == 422
    assert post(server, "/generate_stream", {"inputs": "a", "stream": False}).status_code == 422


def test_another_content_type_is_refused(server: RunningServer) -> None:
    with server.client() as client:
        response = client.post("/generate", content=b"inputs=a", headers={"Content-Type": "text/plain"})
    assert (response.status_code, response.json()["error_type"]) == (415, "validation")


# -- the other routes


def test_info_tells_the_model_and_the_limits(server: RunningServer) -> None:
    with server.client() as client:
        info = client.get("/info").json()
    assert info["model_id"] == "smollm2-135m"
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (2047, 2048)
    assert (info["max_best_of"], info["max_stop_sequences"], info["max_concurrent_requests"]) == (2, 4, 128)
    assert info["router"] == "octavo"
    assert {"model_sha", "model_pipeline_tag", "validation_workers", "max_client_batch_size", "version"} <= set(info)
    assert {"sha", "docker_label"} <= set(info)


def test_programs_get_an_empty_200_at_the_root(server: RunningServer) -> None:
    with server.client() as client:
        response = client.get("/")
    assert (response.status_code, response.content) == (200, b"")


def test_tokenize_gives_places_in_the_bytes_of_the_input(server: RunningServer) -> None:
    text = "Hello wörld 🙂"
    tokens = post(server, "/tokenize", {"inputs": text}).json()
    assert [set(token) for token in tokens] == [{"id", "text", "start", "stop"}] * len(tokens)
    data = text.encode()
    assert [data[token["start"] : token["stop"]].decode() for token in tokens] == [token["text"] for token in tokens]
    assert "".join(token["text"] for token in tokens) == text
    assert post(server, "/tokenize", {"inputs": text, "parameters": {"truncate": 2}}).json() == tokens[-2:]


def test_a_long_text_is_tokenised_as_a_short_one(server: RunningServer) -> None:
    text = "some words é " * 2000
    tokens = post(server, "/tokenize", {"inputs": text}).json()
    assert "".join(token["text"] for token in tokens) == text
    assert tokens[-1]["stop"] == len(text.encode())


def test_tokenize_answers_vllms_body_as_vllm(server: RunningServer) -> None:
    ids = [token["id"] for token in post(server, "/tokenize", {"inputs": PROMPT}).json()]
    assert post(server, "/tokenize", {"prompt": PROMPT}).json()["tokens"] == ids
    refused = post(server, "/tokenize", {"prompt": PROMPT, "surplus": 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400)
    assert post(server, "/tokenize", {"inputs": "a", "surplus": 1}).status_code == 422


def test_chat_tokenize_gives_the_prompt_that_a_chat_runs(server: RunningServer) -> None:
    answer = post(server, "/chat_tokenize", {"messages": QUESTION}).json()
    assert set(answer) == {"tokenize_response", "templated_text"}
    assert "".join(token["text"] for token in answer["tokenize_response"]) == answer["templated_text"]
    chat = post(server, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == len(answer["tokenize_response"])


def test_a_conversation_the_template_does_not_take_is_a_template_error(server: RunningServer) -> None:
    response = post(server, "/chat_tokenize", {"messages": []})
    assert (response.status_code, response.json()["error_type"]) == (422, "template_error")
    assert response.json()["error"].startswith("Template error: ")


def test_invocations_answers_each_kind_of_body_as_its_own_route(server: RunningServer) -> None:
    greedy = {"max_tokens": 3, "temperature": 0}
    body: dict[str, Any] = {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}
    assert post(server, "/invocations", body).json() == post(server, "/", body).json()
    assert events(post(server, "/invocations", {**body, "stream": True}).text)[-1]["index"] == 3
    chat = post(server, "/invocations", {"messages": QUESTION, **greedy}).json()
    assert (chat["object"], chat["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
    completion = post(server, "/invocations", {"prompt": PROMPT, **greedy}).json()
    assert (completion["object"], completion["choices"][0]["text"]) == ("text_completion", " Paris.\n")
    streamed = post(server, "/invocations", {"prompt": PROMPT, "stream": True, **greedy}).text
    assert streamed.endswith("data: [DONE]\n\n")
    for other in ({}, {"text": "a"}, [1]):
        response = post(server, "/invocations", other)
        assert (response.status_code, response.json()["error_type"]) == (422, "validation")


def test_vertex_generates_for_every_instance(server: RunningServer) -> None:
    parameters = {"max_new_tokens": 3, "do_sample": False}
    instances = [{"inputs": PROMPT, "parameters": parameters}, {"inputs": "1 2 3 4", "parameters": parameters}]
    answer = post(server, "/vertex", {"instances": instances}).json()
    assert answer["predictions"][0] == " Paris.\n"
    assert len(answer["predictions"]) == 2
    assert (
        len(post(server, "/vertex", {"instances": [{"inputs": PROMPT, "parameters": {"max_new_tokens": 1}}]}).json())
        == 1
    )
    assert post(server, "/vertex", {"instances": []}).status_code == 422
    chat = {"messages": QUESTION, "max_tokens": 8, "temperature": 0}
    mixed = post(server, "/vertex", {"instances": [instances[0], chat]}).json()["predictions"]
    assert mixed[0] == " Paris.\n"
    assert "Rome" in mixed[1]
    assert post(server, "/vertex", {"instances": [{**chat, "stream": True}]}).status_code == 422
    wrong = {"inputs": PROMPT, "parameters": {"top_p": 1.0}}
    assert post(server, "/vertex", {"instances": [instances[0], wrong]}).status_code == 422


# -- what the integration tests of TGI ask of any model


def test_four_prompts_get_four_indices_streamed_or_not(server: RunningServer) -> None:
    body = {"prompt": ["one", "two", "three", "four"], "max_tokens": 5, "temperature": 0}
    whole = post(server, "/v1/completions", body).json()
    assert sorted(choice["index"] for choice in whole["choices"]) == [0, 1, 2, 3]
    lines = post(server, "/v1/completions", {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}


def test_usage_comes_in_the_last_chunk_and_only_when_asked_for(server: RunningServer) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 4, "temperature": 0, "stream": True}
    for options, expected in (({}, 0), ({"stream_options": {"include_usage": True}}, 1)):
        lines = post(server, "/v1/chat/completions", {**body, **options}).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        with_usage = [chunk for chunk in chunks if chunk.get("usage")]
        assert len(with_usage) == expected
        assert with_usage in ([], chunks[-1:])
        assert all(chunk["choices"] == [] for chunk in with_usage)


def test_tools_together_with_a_grammar_are_refused(server: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    grammar = {"type": "json", "value": {"properties": {}}}
    body = {"messages": QUESTION, "tools": [tool], "response_format": grammar}
    assert 400 <= post(server, "/v1/chat/completions", body).status_code < 500


def test_an_assistant_message_at_the_end_is_continued_when_asked(server: RunningServer) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of Italy is"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    text = post(server, "/chat_tokenize", body).json()["templated_text"]
    assert text.endswith("The capital of Italy is")
    chat = post(server, "/v1/chat/completions", {**body, "max_tokens": 3, "temperature": 0}).json()
    assert "Rome" in chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": "a", "parameters": {"seed": 1 << 64}},
        {"inputs": "a", "parameters": {"max_new_tokens": 10**30}},
        {"inputs": "a", "parameters": {"top_k": 10**12}},
        {"inputs": "a", "parameters": {"temperature": 1e300}},
        {"inputs": "a", "parameters": {"repetition_penalty": 1e-300}},
        {"inputs": "a", "parameters": {"stop": ["x" * 2000]}},
        {"inputs": "a", "parameters": {"truncate": 10**30}},
    ],
)
def test_numbers_and_texts_beyond_any_limit_are_refused(server: RunningServer, body: dict[str, Any]) -> None:
    for path in ("/generate", "/generate_stream"):
        response = post(server, path, body)
        assert response.status_code == 422, response.text
        (field,) = body["parameters"]
        assert field in response.json()["error"]
