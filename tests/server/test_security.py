"""API keys: which are accepted, what they are called, how the file is read again, and that every route asks for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.server.failures import Failure, Kind
from octavo.server.options import ServerOptions
from octavo.server.security import ENVIRONMENT_KEY, KeyRing
from tests.server.running import RunningServer
from tests.server.scripted import ScriptedServer, body, finish, generate, status_of


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_keys_everything_is_open() -> None:
    ring = KeyRing()
    assert not ring.required
    assert ring.check({}) is None
    assert ring.check(bearer("anything")) is None


def test_a_key_has_the_name_before_the_colon_or_one_of_its_own() -> None:
    ring = KeyRing(["alice:wonder", "plain", "bob:with:colons"])
    assert ring.check(bearer("wonder")) == "alice"
    assert ring.check(bearer("with:colons")) == "bob"
    name = ring.check(bearer("plain"))
    assert name is not None
    assert name.startswith("key-")
    assert "plain" not in name


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic wonder"},
        {"authorization": "wonder"},
        bearer("alice:wonder"),
        bearer("wonde"),
        bearer("wonderl"),
        bearer("WONDER"),
        bearer("wonder\udcff"),
    ],
)
def test_anything_else_is_unauthorized(headers: dict[str, str]) -> None:
    with pytest.raises(Failure) as caught:
        KeyRing(["alice:wonder"]).check(headers)
    assert caught.value.kind is Kind.unauthorized


def test_the_scheme_may_be_in_any_case() -> None:
    assert KeyRing(["a:k"]).check({"authorization": "bearer k"}) == "a"


def test_the_environment_adds_a_key() -> None:
    options = ServerOptions(api_key=["a:one"])
    ring = KeyRing.from_options(options, {ENVIRONMENT_KEY: "b:two"})
    assert (ring.name_of("one"), ring.name_of("two")) == ("a", "b")
    assert not KeyRing.from_options(ServerOptions(), {}).required


@pytest.mark.parametrize("line", ["has space", "name:", "tab\there", "naïve"])
def test_a_wrong_key_is_refused_without_being_shown(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KeyRing([line])
    assert line not in str(caught.value)


def replace_file(path: Path, text: str) -> None:
    """As a careful editor does: the new file is complete when it appears."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may come\n\nalice:one\n")
    ring = KeyRing(["root:zero"], str(file))
    assert ring.name_of("one") == "alice"
    replace_file(file, "alice:two\nbob:three\n")
    assert ring.name_of("one") is None
    assert [ring.name_of(key) for key in ("zero", "two", "three")] == ["root", "alice", "bob"]


def test_a_file_gone_bad_leaves_the_keys_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\n")
    ring = KeyRing([], str(file))
    for text in ("two words\n", None):
        if text is None:
            file.unlink()
        else:
            replace_file(file, text)
        assert ring.name_of("one") == "alice"
        assert ring.name_of("two words") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    replace_file(file, "alice:two\n")
    assert ring.name_of("two") == "alice"
    assert ring.name_of("one") is None


def test_a_file_emptied_later_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    ring = KeyRing([], str(file))
    replace_file(file, "")
    with pytest.raises(Failure):
        ring.check({})
    with pytest.raises(Failure):
        ring.check(bearer("one"))


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="api_key_file"):
        KeyRing([], str(file))


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with ScriptedServer(api_key=["alice:one", "bob:two"]) as running:
        yield running


def test_every_route_but_the_probes_asks_for_a_key(guarded: RunningServer) -> None:
    with guarded.client() as client:
        for endpoint in guarded.running.app.endpoints:
            path = endpoint.path.replace("{id}", "x").replace("{model}", "x").replace("{name}", "index.html")
            status = client.request(endpoint.method, path, json=body()).status_code
            open_paths = ("/health", "/ready", "/ping", "/", "/ui/index.html")
            if path in open_paths and endpoint.method == "GET":
                assert status == 200, path
            elif path not in open_paths:
                assert status == 401, path
        assert client.get("/unknown").status_code == 401
        assert client.put("/generate").status_code == 401
        assert client.post("/", json=body()).status_code == 401


def test_each_dialect_refuses_in_its_own_words(guarded: RunningServer) -> None:
    with guarded.client() as client:
        openai = client.get("/v1/models", headers=bearer("wrong"))
        assert openai.json()["error"]["message"]
        assert openai.headers["www-authenticate"] == "Bearer"
        tgi = client.post("/generate", json=body())
        assert (tgi.status_code, tgi.content) == (401, b"")


def test_a_right_key_is_let_in(guarded: RunningServer) -> None:
    with guarded.client(headers=bearer("one")) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.post("/generate", json=body()).json()["generated_text"] == "hello"


def test_a_key_cannot_cancel_what_runs_for_another() -> None:
    with ScriptedServer(held=True, api_key=["alice:one", "bob:two"]) as server:
        running = generate(
            server, "/generate", 5, "Authorization: Bearer one", "X-Request-Id: mine", "Connection: close"
        )
        server.until(lambda: server.gate.reached == 1)
        with server.client() as client:
            assert client.post("/v1/requests/mine/cancel", headers=bearer("two")).status_code == 404
        server.gate.open()
        assert status_of(finish(running)) == 200
