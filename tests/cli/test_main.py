"""The command line as a whole: help, exit codes, one-line errors, closed pipes and interrupts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from octavo.cli.main import main, make_app
from octavo.errors import CapacityError, ConfigError, ModelError, ParameterError
from tests.cli.fakes import FakeLLM, install

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, "."]), "PYTHONIOENCODING": "utf-8"}
# A whole process that answers with a fake model.
ANSWER = (
    "import sys, octavo.cli.options as o; from octavo.cli.main import main; from tests.cli.fakes import FakeLLM;"
    "o.load_llm = lambda model, **settings: FakeLLM(['Gr\u00fc\u00dfe']); sys.exit(main(['run', 'hi']))"
)


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its path, groups included."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield name, command
        for child_name, child in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {child_name}", child)

    yield from walk("octavo", typer.main.get_command(make_app()))


def test_every_option_and_argument_is_described() -> None:
    bare = [
        f"{path} {parameter.name}"
        for path, command in commands()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert bare == []


def test_every_command_is_described() -> None:
    assert [path for path, command in commands() if not command.help] == []


def test_an_option_without_a_shown_default_says_what_its_default_is(capsys: pytest.CaptureFixture[str]) -> None:
    silent = []
    for path, command in commands():
        for parameter in command.params:
            flag = getattr(parameter, "is_flag", False) or getattr(parameter, "is_eager", False)
            optional = parameter.param_type_name == "option" and parameter.default is None and not flag
            if optional and not parameter.multiple and "default:" not in parameter.help:
                silent.append(f"{path} {parameter.name}")
    assert silent == []


@pytest.mark.parametrize("path", [path for path, _ in commands()])
def test_help_is_shown_for_every_command(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*path.split()[1:], "--help"]) == 0
    assert f"Usage: {path}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_without_a_command_the_help_is_shown_as_written(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert main([*arguments, "--help"]) == 0
    assert shown.strip() == capsys.readouterr().out.strip()


def test_help_imports_neither_numpy_nor_the_engine() -> None:
    code = (
        "import sys; from octavo.cli.main import main; main(['run', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'rich', 'tokenizers', 'octavo._native', 'jinja2')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("octavo ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--nonsense", "hi"], "--nonsense"),
        (["rum"], "rum"),
        (["run", "hi", "--threads", "many"], "--threads"),
        (["run", "hi", "--quantization", "w3"], "w3"),
        (["run", "hi", "--threads", "0"], "--threads"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert expected in error
    assert "--help" in error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("the model is odd:\n use another"), 1),
        (CapacityError("too large"), 1),
        (ConfigError("pick one"), 2),
        (ParameterError("top_p", 3, "at most 1"), 2),
        (FileNotFoundError(2, "No such file", "a.gguf"), 1),
        (MemoryError(), 1),
        (ZeroDivisionError("oops"), 1),
    ],
)
def test_an_error_is_one_line_on_stderr(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str, **settings: Any) -> None:
        raise error

    monkeypatch.setattr("octavo.cli.options.load_llm", fail)
    assert main(["run", "hi"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("octavo: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, **settings: Any) -> None:
        raise ModelError("broken")

    monkeypatch.setattr("octavo.cli.options.load_llm", fail)
    with pytest.raises(ModelError):
        main(["--debug", "run", "hi"])


def test_ctrl_c_is_quiet_and_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(token: int) -> None:
        raise KeyboardInterrupt

    llm = install(monkeypatch, FakeLLM(["hello"], during=interrupt))
    assert main(["run", "hi"]) == 130
    assert capsys.readouterr().err == ""
    assert llm.closed


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys, octavo.cli.options as o; from octavo.cli.main import main; from tests.cli.fakes import FakeLLM;"
        "o.load_llm = lambda model, **settings: FakeLLM(['x' * 3000]); sys.exit(main(['run', 'hi']))"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*sys.path, "."]))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert errors == b""


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_closed_standard_stream_is_no_error(closed: str) -> None:
    ending = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-"}[closed]
    process = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {ending}', sys.executable, ANSWER], capture_output=True, env=ENVIRONMENT, timeout=60
    )
    assert process.returncode == 0
    assert process.stdout == (b"" if closed == "stdout" else "Grüße\n".encode())
    assert process.stderr == b""


def test_characters_the_output_cannot_encode_are_replaced() -> None:
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    process = subprocess.run([sys.executable, "-c", ANSWER], capture_output=True, env=environment, timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (0, b"Gr??e\n", b"")
