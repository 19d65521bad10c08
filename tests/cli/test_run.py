"""``octavo run`` streams one answer and says what it cost."""

from __future__ import annotations

import io

import pytest

from octavo.cli.main import main
from tests.cli.fakes import FakeLLM, install


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_the_answer_goes_to_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = install(monkeypatch, FakeLLM(["hello world"]))
    assert main(["run", "hi there"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello world\n"
    assert captured.err == ""
    assert llm.prompts == ["<user>hi there<assistant>"]
    assert llm.closed


def test_a_system_prompt_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = install(monkeypatch, FakeLLM(["ok"]))
    assert main(["run", "--system", "Be brief.", "hi"]) == 0
    assert llm.prompts == ["<system>Be brief.<user>hi<assistant>"]


def test_raw_text_is_continued_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = install(monkeypatch, FakeLLM(["ok"]))
    assert main(["run", "--raw", "Once upon"]) == 0
    assert llm.prompts == ["Once upon"]


def test_a_model_without_a_chat_template_continues_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = install(monkeypatch, FakeLLM(["ok"], chat_template=None))
    assert main(["run", "Once upon"]) == 0
    assert llm.prompts == ["Once upon"]


def test_a_system_prompt_without_a_chat_template_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeLLM(["ok"], chat_template=None))
    assert main(["run", "--system", "x", "hi"]) == 2
    assert "chat template" in capsys.readouterr().err


def test_raw_and_system_contradict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, FakeLLM(["ok"]))
    assert main(["run", "--raw", "--system", "x", "hi"]) == 2
    assert "--system" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["run"], ["run", "-"]])
def test_the_question_can_be_piped_in(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, "from a pipe")
    llm = install(monkeypatch, FakeLLM(["ok"]))
    assert main(arguments) == 0
    assert llm.prompts == ["<user>from a pipe<assistant>"]


def test_an_empty_question_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(monkeypatch, " \n")
    install(monkeypatch, FakeLLM([]))
    assert main(["run"]) == 2
    assert "empty" in capsys.readouterr().err


def test_sampling_and_engine_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = install(monkeypatch, FakeLLM(["ok"]))
    arguments = "run hi -n 7 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --stop a --stop b"
    assert main([*arguments.split(), "-q", "w8", "-t", "2", "--max-model-len", "64", "-m", "other"]) == 0
    (params,) = llm.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 5)
    assert (params.min_p, params.seed, params.stop_strings) == (0.1, 3, ("a", "b"))
    assert llm.settings["model"] == "other"
    assert llm.settings["quantization"] == "w8"
    assert llm.settings["threads"] == 2
    assert llm.settings["max_model_len"] == 64


def test_a_parameter_outside_its_limits_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeLLM(["ok"]))
    assert main(["run", "hi", "--top-p", "1.5"]) == 2
    assert "top_p" in capsys.readouterr().err


def test_figures_are_printed_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, FakeLLM(["hello"]))
    assert main(["run", "--stats", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello\n"
    assert "5 out" in captured.err


def test_the_profile_is_printed_longest_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = install(monkeypatch, FakeLLM(["hello"]))
    monkeypatch.setattr("octavo.cli.profile.machine_peaks", lambda threads: {"dram_GBps": 50.0})
    assert main(["run", "--profile", "hi"]) == 0
    printed = capsys.readouterr().err
    assert (
        printed.index("decode: 2 steps") < printed.index("scheduling") < printed.index("linear") < printed.index("norm")
    )
    assert "dram_GBps 50" in printed.splitlines()[-1]
    assert llm.settings["profile"] is True
