"""``octavo build``: what it prints, that other commands take its folder, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.models.tiny import tiny_models

__all__ = ["tiny_models"]


def test_a_model_is_built_and_other_commands_take_it(
    tiny_models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "built"
    assert main(["build", str(tiny_models["qwen2"]), str(output), "--quantization", "w8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{output}: ")
    assert "x w8 group 32" in captured.out
    assert "packing " in captured.err
    assert main(["plan", str(output)]) == 0
    assert "built (w8)" in capsys.readouterr().out
    arguments = ["run", "hello", "-n", "6", "--temperature", "0", "--raw"]
    answers = []
    for model in (["--model", str(output)], ["--model", str(tiny_models["qwen2"]), "--quantization", "w8"]):
        assert main([*arguments, *model]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert main(["build", str(tiny_models["qwen2"]), str(output)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["build", str(tiny_models["qwen2"]), str(output), "--force", "--tune", "0.05"]) == 0
    assert "measuring" in capsys.readouterr().err
    assert main(["run", "hi", "--model", str(output), "--quantization", "w4"]) == 2
    assert "build it again" in capsys.readouterr().err
