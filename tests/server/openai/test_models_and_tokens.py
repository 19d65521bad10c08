"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.server.openai.scripted import CONTEXT, refusal, scripted_server


def test_the_model_is_listed_with_its_limits(http: httpx.Client, client: OpenAI) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["owned_by"]) == ("scripted", "model", "octavo")
    assert card["max_model_len"] == CONTEXT
    assert card["root"]
    assert card["parent"] is None
    assert card["permission"][0]["object"] == "model_permission"
    assert http.get("/v1/models/scripted").json() == card
    assert client.models.retrieve("scripted").id == "scripted"
    assert [model.id for model in client.models.list()] == ["scripted"]


@pytest.fixture(scope="module")
def named() -> Iterator[httpx.Client]:
    """A model served under two names, one with a slash."""
    with scripted_server(served_model_name=("org/model", "alias")) as server, server.client() as http:
        yield http


def test_a_model_can_have_several_names_also_with_slashes(named: httpx.Client) -> None:
    assert [card["id"] for card in named.get("/v1/models").json()["data"]] == ["org/model", "alias"]
    assert named.get("/v1/models/org/model").json()["id"] == "org/model"
    for name in ("org/model", "alias"):
        assert named.post("/v1/completions", json={"model": name, "prompt": "say:a"}).json()["model"] == name
    assert named.post("/v1/completions", json={"prompt": "say:a"}).json()["model"] == "org/model"


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    error = refusal(http.get("/v1/models/some/other"), 404)
    assert error["message"] == "The model `some/other` does not exist."


PATHS = pytest.mark.parametrize("prefix", ["", "/v1"])


@PATHS
def test_text_becomes_tokens_and_back(http: httpx.Client, prefix: str) -> None:
    found = http.post(f"{prefix}/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert found["tokens"] == [257, 104, 195, 169]
    assert found["count"] == 4
    assert found["max_model_len"] == CONTEXT
    assert found["token_strs"] == ["<bos>", "h", "Ã", "©"]
    plain = http.post(f"{prefix}/tokenize", json={"prompt": "hé", "add_special_tokens": False}).json()
    assert plain == {"count": 3, "max_model_len": CONTEXT, "tokens": [104, 195, 169], "token_strs": None}
    assert http.post(f"{prefix}/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "<bos>hé"}


@PATHS
def test_a_conversation_becomes_the_tokens_a_chat_would_run(http: httpx.Client, prefix: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "say:x"}]}]
    found = http.post(f"{prefix}/tokenize", json={"messages": messages}).json()
    chat = http.post("/v1/chat/completions", json={"messages": messages, "return_token_ids": True}).json()
    assert found["tokens"] == chat["prompt_token_ids"]
    open_ended = http.post(f"{prefix}/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert bytes(open_ended["tokens"]) == b"(user)say:x"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools"),
        ({"prompt": "a", "colour": 1}, "colour"),
        ({"messages": [], "model": "scripted"}, "messages"),
    ],
)
def test_what_cannot_be_tokenised_is_refused(http: httpx.Client, body: dict[str, object], param: str) -> None:
    assert refusal(http.post("/v1/tokenize", json=body))["param"] == param
    assert refusal(http.post("/v1/tokenize", json={"prompt": "a", "model": "no"}), 404)["param"] == "model"


@pytest.mark.parametrize("wrong", [260, -1, 1 << 70])
def test_ids_outside_the_vocabulary_are_refused(http: httpx.Client, wrong: int) -> None:
    error = refusal(http.post("/v1/detokenize", json={"tokens": [97, wrong]}))
    assert error["param"] == "tokens"
    assert str(wrong) in error["message"]


def test_no_tokens_are_no_text(http: httpx.Client) -> None:
    assert http.post("/v1/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/v1/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["count"] == 0


def test_tokens_of_a_long_text_are_told_as_those_of_a_short_one(http: httpx.Client) -> None:
    # "é" is two tokens of this vocabulary; an answer of so many is made in pieces.
    short = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    many = 5000
    found = http.post("/tokenize", json={"prompt": "hé" * many, "return_token_strs": True}).json()
    assert found["count"] == 3 * many + 1
    assert found["tokens"] == short["tokens"][:1] + short["tokens"][1:] * many
    assert found["token_strs"] == short["token_strs"][:1] + short["token_strs"][1:] * many
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "<bos>" + "hé" * many}
