"""``octavo chat`` keeps the conversation, obeys its commands, and survives Ctrl-C during an answer."""

from __future__ import annotations

import io
import os
import signal

import pytest

from octavo.cli.main import main
from tests.cli.fakes import FakeLLM, install


def talk(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, *lines: str, options: tuple[str, ...] = ()) -> int:
    install(monkeypatch, llm)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *options])


def test_what_was_said_is_remembered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(["one", "two"])
    assert talk(monkeypatch, llm, "a", "", "b") == 0
    assert llm.prompts == ["<user>a<assistant>", "<user>a<assistant>one<user>b<assistant>"]
    assert capsys.readouterr().out == "one\ntwo\n"
    assert llm.closed


def test_clear_forgets_all_but_the_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM(["one", "two"])
    assert talk(monkeypatch, llm, "a", "/clear", "b", options=("--system", "S")) == 0
    assert llm.prompts[1] == "<system>S<user>b<assistant>"


def test_a_new_system_prompt_starts_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(["one", "two"])
    assert talk(monkeypatch, llm, "a", "/system Be odd.", "b", "/system") == 0
    assert llm.prompts[1] == "<system>Be odd.<user>b<assistant>"
    assert "Be odd." in capsys.readouterr().err


def test_exit_leaves_before_the_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM(["one"])
    assert talk(monkeypatch, llm, "a", "/exit", "b") == 0
    assert len(llm.prompts) == 1


def test_history_and_help_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(monkeypatch, FakeLLM(["one"]), "a", "/history", "/help") == 0
    error = capsys.readouterr().err
    assert "user: a\nassistant: one\n" in error
    assert "/clear" in error


def test_an_unknown_command_is_not_sent_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM([])
    assert talk(monkeypatch, llm, "/frobnicate") == 0
    assert llm.prompts == []
    assert "/frobnicate" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(token: int) -> None:
        if token == 3 and len(llm.prompts) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    llm = FakeLLM(["abcdefgh", "two"], during=press)
    assert talk(monkeypatch, llm, "a", "b") == 0
    assert capsys.readouterr().out == "abc [stopped]\ntwo\n"
    assert llm.aborted == 1
    assert llm.prompts[1] == "<user>a<assistant>abc<user>b<assistant>"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_oldest_messages_are_left_out_when_the_context_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM(["x" * 20] * 4, max_model_len=130)
    assert talk(monkeypatch, llm, "first", "second", "third", "fourth") == 0
    assert "first" not in llm.prompts[3]
    assert "third" in llm.prompts[3]
    assert "left out" in capsys.readouterr().err


def test_figures_follow_each_answer_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, FakeLLM(["one"]), "a", options=("--stats",)) == 0
    assert "3 out" in capsys.readouterr().err
