"""``octavo quantize``: the directory and the report it leaves, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.models.tiny import TINY_MODELS, make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama")))


COMMON = ["--group-size", "32", "--samples", "3", "--seq-len", "64", "--no-evaluate"]


def test_a_report_is_left_beside_the_weights(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["quantize", tiny, str(out), "--method", "gptq", *COMMON]) == 0
    captured = capsys.readouterr()
    assert "worst, error of outputs over the calibration inputs" in captured.out
    assert "layer: 3 of 3; worst model.layers.2." in captured.err
    report = json.loads((out / "report.json").read_text())
    assert report["settings"]["method"] == "gptq"
    assert len(report["layers"]) == 3
    assert report["bytes"] < report["source_bytes"]
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "q_proj" in page


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--method", "magic"], 2, "--method must be one of"),
        (["--method", "awq", "--bits", "8"], 2, "--bits must be 4 for the awq layout"),
        (["--method", "awq"], 2, "do not divide into groups of 128; --group-size may be 32"),
        (["--method", "gptq", "--calibration", "none.txt"], 2, "none.txt: No such file"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tiny: str, tmp_path: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", tiny, str(tmp_path / "out"), *words, "--no-evaluate"]) == code
    assert message in capsys.readouterr().err


def test_a_file_is_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert main(["quantize", str(tmp_path / "x.gguf"), str(tmp_path / "out")]) == 2
    assert "is a file; what can be quantised is a directory" in capsys.readouterr().err
