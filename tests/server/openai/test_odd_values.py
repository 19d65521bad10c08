"""No value of any field makes the server fail: every request is answered or refused with a 400 that names a field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from octavo.server.openai.schemas_chat import ChatRequest
from octavo.server.openai.schemas_completions import CompletionRequest
from octavo.server.openai.tokenize import DetokenizeRequest, TokenizeRequest
from tests.server.openai.scripted import refusal

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**30, -(10**30), 0.5, -0.0, 1e308, 5e-324, "", "a", "\ud800", "\x00", "é" * 300,
    [], [[]], [None], [0], [-1], [10**12], ["a", 1], [{}], {}, {"a": 1}, {"1": 1.5}, {"type": "text"}, {"": None},
]  # fmt: skip

ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "say:a"}], "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "say:a", "max_tokens": 2}),
    "/v1/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/v1/detokenize": (DetokenizeRequest, {"tokens": [97]}),
}


def cases() -> list[tuple[str, str]]:
    return [(path, field) for path, (body, _) in ROUTES.items() for field in body.__struct_fields__]


@pytest.mark.parametrize(("path", "field"), cases())
def test_odd_values_are_answered_or_refused(http: httpx.Client, path: str, field: str) -> None:
    for value in ODD:
        body = {**ROUTES[path][1], field: value}
        response = http.post(path, content=dumped(body), headers={"content-type": "application/json"})
        if response.status_code not in (200, 404) or (response.status_code == 404 and field != "model"):
            error = refusal(response)
            assert error["param"] or "JSON" in error["message"], (value, error)
            assert len(error["message"]) < 1100


def dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize("depth", [50, 400, 800, *range(900, 1000, 7), 5000])
def test_deeply_nested_values_are_answered_or_refused(http: httpx.Client, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for field in ("metadata", "chat_template_kwargs", "documents", "tools", "response_format", "logit_bias"):
        body = f'{{"messages": [{{"role": "user", "content": "say:a"}}], "{field}": {nested}}}'
        assert http.post("/v1/chat/completions", content=body).status_code == 400
    body = f'{{"messages": [{{"role": "user", "content": "say:a"}}], "chat_template_kwargs": {{"a": {nested}}}}}'
    assert http.post("/v1/chat/completions", content=body).status_code in (200, 400)


def test_a_long_unknown_name_is_not_sent_back_in_full(http: httpx.Client) -> None:
    error = refusal(http.post("/v1/completions", json={"prompt": "a", "x" * 100_000: 1}))
    assert len(error["message"]) < 400
    assert len(error["param"]) == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{}]}],
        [{"role": "user", "content": [{"type": 1}]}],
        [{"role": "user", "content": [{"type": None, "text": None}]}],
        [{"role": "user"}],
        [{"role": ""}],
        [None],
        ["a"],
        [[]],
        [{"role": "tool", "content": "a", "tool_call_id": 1}],
        [{"role": "assistant", "tool_calls": [1]}],
    ],
)
def test_odd_messages_are_refused(http: httpx.Client, messages: Any) -> None:
    assert "messages" in str(refusal(http.post("/v1/chat/completions", json={"messages": messages}))["param"])
