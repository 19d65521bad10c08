"""``octavo tune`` on a tiny model: what it prints and writes, and that engines then use it and answer the same."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from tests.models.tiny import tiny_models

__all__ = ["tiny_models"]

PROMPT = {"prompt_token_ids": [5, 9, 33, 120, 7]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_TUNING", raising=False)
    return tmp_path / "cache"


def answers(model: Path, **options: object) -> tuple[list[object], str]:
    """What the model says, with log-probabilities, and the report of its start."""
    llm = LLM(str(model), threads=2, **options)
    try:
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        return [output.outputs[0].token_ids, output.outputs[0].logprobs], llm.memory_report
    finally:
        llm.close()


def test_a_model_is_tuned_and_engines_use_what_was_found(
    tiny_models: dict[str, Path], cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_models["qwen2"]
    before, report = answers(model)
    assert "tuning: 0 of " in report
    assert main(["tune", str(model), "--seconds", "0.6", "--threads", "2"]) == 0
    captured = capsys.readouterr()
    (written,) = (cache / "tuning").glob("*.json")
    assert captured.out.rstrip().endswith(f"Written to {written}")
    for part in ("product", "q, k, v: ", "down: ", "head: ", "built in", "chosen", "as good", "2 threads"):
        assert part in captured.out
    assert "measuring 1 rows" in captured.err
    assert "measuring 97-256 rows" in captured.err
    after, report = answers(model)
    found, total = report.rsplit("tuning: ", 1)[1].split(" tile choices")[0].split(" of ")
    assert int(found) == int(total) > 0
    assert str(written) in report
    assert after == before
    _, report = answers(model, tuning="off")
    assert f"tuning: 0 of {total} tile choices measured" in report
    # Another form of the weights has other shapes: those measured stay in the file.
    other = tmp_path / "other.json"
    assert main(["tune", str(model), "--seconds", "0.3", "-t", "2", "-q", "w8", "--output", str(other)]) == 0
    _, report = answers(model, quantization="w8", tuning=str(other))
    assert report.endswith(f", in {other}")


def test_a_damaged_file_is_said_and_not_used(
    tiny_models: dict[str, Path], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_models["llama"]
    assert main(["tune", str(model), "--seconds", "0.3", "--threads", "2"]) == 0
    (written,) = (cache / "tuning").glob("*.json")
    written.write_bytes(written.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        _, report = answers(model)
    assert "tuning: 0 of " in report
    assert f"{written} is damaged and not used" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "0"),
        (["--threads", "0"], "--threads"),
        (["--quantization", "w3"], "w3"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], message: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "no-such-model", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_another_file_is_not_overwritten(
    tiny_models: dict[str, Path], tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert main(["tune", str(tiny_models["llama"]), "--output", str(notes), "--seconds", "0.3"]) == 2
    assert "it is left alone" in capsys.readouterr().err
    assert notes.read_text() == "mine"
