"""/v1/completions: prompts in all forms, echo, log-probabilities, choices, through plain HTTP and OpenAI's client."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.frontend.fakes import BOS
from tests.server.openai.scripted import events, refusal

PATH = "/v1/completions"


def answer(http: httpx.Client, prompt: Any = "say:hello", **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def stream(http: httpx.Client, prompt: Any = "say:hello", **fields: Any) -> list[dict[str, Any]]:
    return events(http.post(PATH, json={"prompt": prompt, "stream": True, **fields}))


def choices_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for event in found for choice in event["choices"]]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for choice in choices_of(found) if choice["index"] == index)


def test_an_answer_has_openais_shape(http: httpx.Client) -> None:
    found = answer(http)
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert found["usage"]["prompt_tokens"] == len("say:hello") + 1
    assert found["usage"]["completion_tokens"] == 6


def test_the_openai_client_reads_an_answer(client: OpenAI) -> None:
    found = client.completions.create(model="scripted", prompt="say:hello", logprobs=1)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == ("hello", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*"hello", "<eos>"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5]


def test_an_answer_has_16_tokens_unless_told_otherwise(http: httpx.Client) -> None:
    choice = answer(http, "go")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcdefghijklmnop", "length")
    assert answer(http, "go", max_tokens=None)["choices"][0]["text"] == "abcdefghijklmnop"
    assert answer(http, "go", max_tokens=2)["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("say:one", ["one"]),
        (["say:one", "say:two"], ["one", "two"]),
        (list(b"say:one"), ["one"]),
        ([list(b"say:one"), list(b"say:two"), list(b"say:three")], ["one", "two", "three"]),
    ],
)
def test_prompts_in_all_forms_are_answered_in_their_order(http: httpx.Client, prompt: Any, texts: list[str]) -> None:
    found = answer(http, prompt)
    assert [choice["index"] for choice in found["choices"]] == list(range(len(texts)))
    assert [choice["text"] for choice in found["choices"]] == texts
    streamed = stream(http, prompt, stream_options={"include_usage": True})
    assert [text_of(streamed, index) for index in range(len(texts))] == texts
    usage, whole = streamed[-1]["usage"], found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (whole["prompt_tokens"], whole["completion_tokens"])


def test_choices_of_several_prompts_are_numbered_through(http: httpx.Client) -> None:
    found = answer(http, ["say:one", "say:two"], n=2, seed=3)
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [
        (0, "one"), (1, "one"), (2, "two"), (3, "two"),
    ]  # fmt: skip
    streamed = stream(http, ["say:one", "say:two"], n=2, seed=3)
    assert [text_of(streamed, index) for index in range(4)] == ["one", "one", "two", "two"]
    assert sum(choice["finish_reason"] is not None for choice in choices_of(streamed)) == 4
    assert sum("system_fingerprint" in event for event in streamed) == 1


def test_special_tokens_stand_before_a_text_unless_told_otherwise(http: httpx.Client) -> None:
    assert answer(http, "say:x", return_token_ids=True)["choices"][0]["prompt_token_ids"] == [BOS, *b"say:x"]
    without = answer(http, "say:x", return_token_ids=True, add_special_tokens=False)["choices"][0]
    assert without["prompt_token_ids"] == list(b"say:x")
    assert without["token_ids"] == [ord("x"), 256]


def test_a_stream_has_openais_shape(http: httpx.Client) -> None:
    found = stream(http)
    assert len({(event["id"], event["created"], event["object"], event["model"]) for event in found}) == 1
    *middle, last = choices_of(found)
    assert text_of(found) == "hello"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
    for choice in middle:
        assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
        assert choice["text"]


def test_the_openai_client_reads_a_stream(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="scripted", prompt="say:hello", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_echo_puts_the_prompt_before_the_answer(http: httpx.Client) -> None:
    assert answer(http, "say:hi", echo=True)["choices"][0]["text"] == "say:hihi"
    assert answer(http, list(b"say:hi"), echo=True)["choices"][0]["text"] == "say:hihi"
    assert answer(http, ["say:hi", "say:yo"], echo=True)["choices"][1]["text"] == "say:yoyo"
    found = stream(http, "say:hi", echo=True, n=2, seed=1)
    assert [text_of(found, index) for index in range(2)] == ["say:hihi", "say:hihi"]


def test_echo_has_the_logprobs_of_the_prompt_too(http: httpx.Client) -> None:
    choice = answer(http, "say:hi", echo=True, logprobs=1)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<bos>", *"say:hihi", "<eos>"]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * 9]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"s": -0.5, "t": -1.5}
    assert logprobs["text_offset"][:3] == [0, 5, 6]
    assert "prompt_logprobs" not in choice


def test_a_stream_with_echo_and_logprobs_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "return_token_ids": True}
    whole = answer(http, "say:hello", **fields)["choices"][0]
    found = choices_of(stream(http, "say:hello", **fields))
    assert "".join(choice["text"] for choice in found) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for choice in found for value in choice["logprobs"][name]] == values
    assert [token for choice in found for token in choice["token_ids"]] == whole["token_ids"]
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in choice for choice in found[1:])


def test_echo_without_an_answer_scores_the_prompt(http: httpx.Client) -> None:
    found = answer(http, "say:hi", echo=True, max_tokens=0, logprobs=1)
    (choice,) = found["choices"]
    assert choice["text"] == "say:hi"
    assert choice["logprobs"]["tokens"] == ["<bos>", *"say:hi"]
    assert choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0
    streamed = stream(http, "say:hi", echo=True, max_tokens=0, stream_options={"include_usage": True})
    assert text_of(streamed) == "say:hi"
    assert streamed[-1]["usage"]["completion_tokens"] == 0
    assert answer(http, "say:hi", echo=True, max_tokens=0, n=2, seed=1)["choices"][1]["text"] == "say:hi"


def test_prompt_logprobs_stand_in_the_choice(http: httpx.Client) -> None:
    choice = answer(http, "say:hi", prompt_logprobs=2)["choices"][0]
    assert len(choice["prompt_logprobs"]) == len("say:hi") + 1
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        "115": {"logprob": -0.5, "rank": 1, "decoded_token": "s"},
        "116": {"logprob": -1.5, "rank": 2, "decoded_token": "t"},
    }


def test_the_best_of_several_answers_is_given(http: httpx.Client) -> None:
    found = answer(http, "say:hi", n=1, best_of=3, seed=5)
    assert [choice["index"] for choice in found["choices"]] == [0]
    error = refusal(http.post(PATH, json={"prompt": "a", "best_of": 2, "stream": True}))
    assert error["param"] == "best_of"


def test_bad_words_bias_and_allowed_ids_reach_the_sampler(http: httpx.Client) -> None:
    """The scripted model does not sample, so it is enough that they are taken; the real model's tests see them work."""
    fields: dict[str, Any] = {
        "bad_words": ["no"],
        "logit_bias": {"97": -100},
        "allowed_token_ids": [97, 98],
        "repetition_penalty": 1.1,
        "top_k": 5,
        "min_p": 0.1,
        "typical_p": 0.9,
    }
    assert answer(http, "say:hi", **fields)["choices"][0]["text"] == "hi"


def test_users_with_other_salts_share_no_cache(http: httpx.Client) -> None:
    prompt = "say:" + "a prompt that fills several blocks of the cache, at least two of them"

    def cached(salt: str | None) -> int:
        usage = answer(http, prompt, max_tokens=1, cache_salt=salt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached("one")
    assert cached("two") == 0
    assert cached("one") >= 16
