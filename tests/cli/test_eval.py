"""``octavo eval`` on a tiny model: the table, the record, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.models.tiny import TINY_MODELS, make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(TINY_MODELS["llama"], tmp_path_factory.mktemp("llama")))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "words.txt").write_text("Every sheet is folded three times, and then sewn. " * 8)
    return str(tmp_path / "words.txt")


def test_a_form_against_the_model_itself(
    tiny: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "record.json"
    command = ["eval", tiny, "-q", "w8", "--kl", tiny, "--text", text, "--window-tokens", "32", "--threads", "1"]
    assert main([*command, "--json", "--output", str(kept)]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record == json.loads(kept.read_text())
    assert (record["form"], record["reference"]["form"], record["text"]) == ("w8", "f32", "words.txt")
    assert 0 < record["divergence"]["mean_kl"] < 0.1
    assert record["divergence"]["top1"] > 0.7
    assert record["weights_bytes"] < record["reference"]["weights_bytes"]
    assert f"window: {record['windows']} of {record['windows']}; perplexity" in captured.err


def test_the_table_shows_perplexity(tiny: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", tiny, "--ppl", text, "--window-tokens", "32", "--windows", "2", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "perplexity" in out
    assert "as stored" in out
    assert out.rstrip().endswith("words.txt, 2 windows of 32 tokens")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to measure: give --ppl FILE, --kl MODEL or both"),
        (["--text", "a.txt", "--ppl", "b.txt"], "leave one of the two out"),
        (["--ppl", "missing.txt"], "missing.txt: No such file"),
        (["--kl", "x", "--reference-quantization", "w5"], "--reference-quantization must be one of f32, stored"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tiny: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", tiny, *words]) == 2
    assert message in capsys.readouterr().err
