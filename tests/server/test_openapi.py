"""/openapi.json describes every route as it is, and /docs shows it without anything from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import RunningServer
from tests.server.scripted import ScriptedServer, body


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture(scope="module")
def document(running: RunningServer) -> dict[str, Any]:
    with running.client() as client:
        found: dict[str, Any] = client.get("/openapi.json").json()
        assert client.get("/api-doc/openapi.json").json() == found
        return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_is_described_and_no_other(running: RunningServer, document: dict[str, Any]) -> None:
    known = {(re.sub(r":\w+}", "}", one.path), one.method.lower()) for one in running.running.app.endpoints}
    assert {(path, method) for path, method, _ in operations(document)} == known
    assert document["openapi"].startswith("3.1")


def test_every_reference_leads_somewhere_and_every_id_is_its_own(document: dict[str, Any]) -> None:
    names = set(document["components"]["schemas"])
    for reference in re.findall(r"'\$ref': '#/components/schemas/([^']+)'", str(document)):
        assert reference in names
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))


def test_each_operation_says_who_may_call_it_and_what_can_go_wrong(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        responses = operation["responses"]
        assert "200" in responses
        assert {"400", "408", "431", "500"} <= set(responses), path
        assert ("401" in responses) == bool(operation["security"]), path
        assert ("413" in responses) == (method == "post"), path
        assert ("{" in path) == ("parameters" in operation), path
        if operation["security"]:
            assert path not in ("/health", "/ready", "/ping")
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"401", "404", "413", "429", "500", "503", "504"} <= set(chat)
    assert "Retry-After" in chat["429"]["headers"]
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}
    generate = document["paths"]["/generate"]["post"]["responses"]
    assert {"422", "424", "429"} <= set(generate)
    assert "content" not in generate["401"]
    assert generate["422"]["content"]["application/json"]["schema"]["$ref"].endswith("/FlatError")


REQUESTS = ("ChatRequest", "CompletionRequest", "GenerateRequest", "Message", "Parameters", "StreamOptions")


@pytest.mark.parametrize("name", REQUESTS)
def test_fields_of_requests_carry_their_documentation(document: dict[str, Any], name: str) -> None:
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        assert schema.get("description"), field


def test_limits_in_the_document_are_those_that_are_kept(running: RunningServer, document: dict[str, Any]) -> None:
    for name, path, sent in (
        ("ChatRequest", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("CompletionRequest", "/v1/completions", {"prompt": "hi"}),
        ("Parameters", "/generate", {"inputs": "hi"}),
    ):
        tried = 0
        with running.client() as client:
            for field, schema in document["components"]["schemas"][name]["properties"].items():
                for key, step in _BEYOND.items():
                    if key in schema:
                        beyond = {field: schema[key] + step}
                        answer = client.post(path, json=sent | ({"parameters": beyond} if "inputs" in sent else beyond))
                        assert answer.status_code in (400, 422), (path, beyond)
                        tried += 1
        assert tried > 8


# How far from a bound a value lies that is not allowed.
_BEYOND = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 0}


def test_errors_look_as_described(running: RunningServer, document: dict[str, Any]) -> None:
    with running.client() as client:
        for path, sent in (("/v1/completions", {"prompt": 1.5}), ("/generate", {"inputs": 1}), ("/nothing", {})):
            answer = client.post(path, json=sent).json()
            shape = "NestedError" if isinstance(answer["error"], dict) else "FlatError"
            schema = document["components"]["schemas"][shape]
            assert set(answer) == set(schema["required"])
            if shape == "NestedError":
                assert set(answer["error"]) == set(document["components"]["schemas"]["ErrorDetail"]["required"])
        assert client.post("/generate", json=body()).status_code == 200


def test_the_page_needs_nothing_from_elsewhere_and_no_script(running: RunningServer) -> None:
    with running.client() as client:
        response = client.get("/docs")
        assert response.headers["content-type"].startswith("text/html")
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src" not in policy
        html = response.text
    assert not re.search(r"<script|<link|src=|https?://", html)
    links = set(re.findall(r'href="#([^"]+)"', html))
    assert links <= set(re.findall(r'id="([^"]+)"', html))
    assert "<td>number from 0 to 2</td><td>1</td><td>0 takes the likeliest token" in html
    assert "Not built, and refused" in html
    for word in ("/v1/chat/completions", "max_tokens", "repetition_penalty", "/v1/requests/{id}/cancel"):
        assert word in html
