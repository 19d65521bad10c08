"""What every route has in common: unknown paths and methods, HEAD and OPTIONS, request ids, CORS, bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from octavo.server.app import App
from octavo.server.endpoints import Endpoint, NestedDialect
from tests.server.running import RunningServer
from tests.server.scripted import ScriptedServer, body, post, status_of

ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with ScriptedServer(max_body_bytes=1000, cors_allow_origins=[ORIGIN], body_timeout=0.3) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def test_an_unknown_path_is_a_nested_404(client: httpx.Client) -> None:
    for method in ("GET", "POST", "DELETE"):
        response = client.request(method, "/nothing/here")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == 404
        assert "/nothing/here" in response.json()["error"]["message"]


def test_a_wrong_method_is_405_with_what_is_allowed_in_the_dialect_of_the_path(client: httpx.Client) -> None:
    response = client.delete("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "OPTIONS, POST")
    assert response.json()["error"]["code"] == 405
    response = client.get("/generate")
    assert (response.status_code, response.json()["error_type"]) == (405, "method_not_allowed")
    assert client.post("/health").headers["allow"] == "GET, HEAD, OPTIONS"


def test_head_answers_as_get_without_a_body(client: httpx.Client) -> None:
    response = client.head("/version")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == len(client.get("/version").content)
    assert client.head("/generate").status_code == 405


def test_options_says_what_is_allowed(client: httpx.Client) -> None:
    response = client.options("/generate")
    assert (response.status_code, response.headers["allow"], response.content) == (204, "OPTIONS, POST", b"")


def test_probes_answer(client: httpx.Client) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ready"), ("GET", "/ping"), ("POST", "/ping")):
        response = client.request(method, path)
        assert (response.status_code, response.content) == (200, b""), path
    assert client.get("/version").json().keys() == {"version"}
    assert client.get("/load").json() == {"server_load": 0}


def test_a_request_id_is_echoed_and_made_when_there_is_none(client: httpx.Client) -> None:
    assert client.get("/health", headers={"X-Request-Id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"
    assert client.get("/none", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    fresh = {client.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(fresh) == 2


@pytest.mark.parametrize("given", ["a b", "x" * 200, 'quo"te', "semi;colon"])
def test_a_strange_request_id_is_replaced(client: httpx.Client, given: str) -> None:
    assert client.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] != given


def test_two_requests_may_have_the_same_id(client: httpx.Client) -> None:
    for _ in range(2):
        response = client.post("/generate", json=body(), headers={"X-Request-Id": "same"})
        assert response.json() == {"generated_text": "hello"}


def test_a_preflight_of_an_allowed_origin_is_answered(client: httpx.Client) -> None:
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = client.options("/v1/chat/completions", headers=asked)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization,content-type"


def test_a_preflight_of_another_origin_is_refused(client: httpx.Client) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    response = client.options("/generate", headers=asked)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


def test_answers_and_errors_can_be_read_by_pages_of_the_origin(client: httpx.Client) -> None:
    for path in ("/version", "/nothing"):
        response = client.get(path, headers={"Origin": ORIGIN})
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "origin" in response.headers["vary"].lower()
        assert "access-control-allow-origin" not in client.get(path, headers={"Origin": "https://e.example"}).headers


def test_without_origins_no_cors_header_is_sent() -> None:
    with ScriptedServer() as other, other.client() as client:
        response = client.options("/generate", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "POST"})
        assert response.status_code == 204
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_any_origin_may_be_allowed() -> None:
    with ScriptedServer(cors_allow_origins="*") as other, other.client() as client:
        assert client.get("/version", headers={"Origin": ORIGIN}).headers["access-control-allow-origin"] == "*"


def test_a_body_that_is_too_large_is_413_also_without_a_length(server: RunningServer, client: httpx.Client) -> None:
    large = {"inputs": "x" * 1000}
    response = client.post("/v1/completions", json=large)
    assert (response.status_code, response.json()["error"]["code"]) == (413, 413)
    assert client.post("/generate", json=large).json()["error_type"] == "validation"
    chunks = b"".join(b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
    head = b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert status_of(server.raw(head + chunks)) == 413


def test_the_answer_to_a_body_far_too_large_arrives(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 3000000\r\n\r\n")
        connection.sendall(b"x" * 3_000_000)
        assert status_of(connection.recv(1000)) == 413


def test_a_body_of_another_type_is_415_and_as_in_vllm_400_on_its_routes(client: httpx.Client) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for path, status in (("/generate", 415), ("/v1/completions", 400)):
        assert client.post(path, content=b"inputs=x", headers=form).status_code == status, path
    for media_type in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/problem+json"):
        content = json.dumps(body()).encode()
        assert client.post("/generate", content=content, headers={"Content-Type": media_type}).status_code == 200


def test_a_body_without_a_type_is_taken_as_json(server: RunningServer) -> None:
    data = json.dumps(body()).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    assert b'"hello"' in server.raw(head.encode() + data)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"inputs": 1}'])
def test_a_body_that_is_no_request_is_the_clients_fault(client: httpx.Client, content: bytes) -> None:
    for path in ("/v1/completions", "/generate"):
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code in (400, 422), path


def test_a_body_that_does_not_come_is_408(server: RunningServer) -> None:
    assert status_of(server.raw(post("/generate", body())[:-5])) == 408


def test_a_request_answered_before_its_body_came_leaves_the_connection_usable(server: RunningServer) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\n")
            assert status_of(connection.recv(1000)) == 200
            connection.sendall(b"later")


def test_cancelling_what_does_not_run_is_404(client: httpx.Client) -> None:
    response = client.post("/v1/requests/none/cancel")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "id")


def test_the_prefix_cache_is_reset_on_demand(client: httpx.Client) -> None:
    assert client.post("/reset_prefix_cache").json() == {"reset": True}


def test_metrics_are_served(client: httpx.Client) -> None:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "octavo:open_connections" in response.text


def test_browsers_get_the_page_and_tgi_clients_their_health(client: httpx.Client) -> None:
    page = client.get("/", headers={"Accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert client.get("/").content == b""


def test_two_endpoints_cannot_share_a_route(server: RunningServer) -> None:
    async def handler(call: object) -> None:
        raise AssertionError

    one = Endpoint(method="GET", path="/x", handler=handler, dialect=NestedDialect(), summary="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="GET /x has two endpoints"):
        App(server.serving, [one, one])
