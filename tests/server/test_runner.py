"""Starting a server: where it listens, what it is told, and what it refuses before anything is loaded."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

import octavo
from octavo.errors import ConfigError, ParameterError
from octavo.server.listening import bind
from octavo.server.options import ServerOptions
from octavo.server.runner import _chat_template
from tests.server.scripted import ScriptedServer, body


def test_a_chat_template_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}é", encoding="utf-8")
    assert _chat_template(ServerOptions()) is None
    assert _chat_template(ServerOptions(chat_template=str(file))) == "{{ messages }}é"
    assert _chat_template(ServerOptions(chat_template="{{ messages }}")) == "{{ messages }}"
    file.write_bytes(b"\xff\xfe")
    for wrong in (str(file), str(tmp_path / "absent")):
        with pytest.raises(ConfigError, match="chat_template"):
            _chat_template(ServerOptions(chat_template=wrong))


def test_a_server_is_not_started_where_no_signal_can_end_it() -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            octavo.serve(port=0)
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(30)
    assert "main thread" in str(caught[0])


def test_a_wrong_option_is_refused_by_name() -> None:
    with pytest.raises(ParameterError, match="prot"):
        octavo.serve(prot=1)


def test_a_name_with_several_addresses_is_listened_on_at_each_that_exists() -> None:
    sockets = bind(ServerOptions(host="localhost", port=0))
    try:
        assert sockets
        assert all(bound.getsockname()[1] > 0 for bound in sockets)
    finally:
        for bound in sockets:
            bound.close()


def test_a_socket_in_use_by_a_server_is_not_taken_from_it(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind(ServerOptions(uds=path))


def test_a_server_answers_under_every_name_it_was_given() -> None:
    with ScriptedServer(served_model_name=["one", "two"]) as server, server.client() as client:
        for name, status in (("one", 200), ("two", 200), ("smollm2-135m", 404), (None, 200)):
            response = client.post("/v1/completions", json={"model": name, "prompt": "x"})
            assert response.status_code == status, name
        assert client.post("/generate", json=body()).status_code == 200
