"""``octavo plan`` and ``octavo pull`` on the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli.main import main


def test_the_plan_shows_model_machine_choices_and_table(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(smollm2_path), "--max-num-seqs", "2", "--max-model-len", "1024"]) == 0
    output = capsys.readouterr().out
    for part in (
        "llama",
        "machine",
        "w8, bf16 KV",
        "as in the file, int8 KV",
        "(chosen)",
        "weights",
        "KV pool",
        "arena",
        "reserve",
    ):
        assert part in output
    assert "128 blocks, 2,048 tokens, 2 sequences of 1,024" in output


def test_the_graph_is_shown_when_asked_for(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(smollm2_path), "--graph"]) == 0
    assert "attention" in capsys.readouterr().out


def test_what_cannot_fit_is_said_with_numbers_and_remedies(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.planning.hardware import Hardware, MemoryCeiling

    small = Hardware("CPU", "x86_64", 2, 2, None, (MemoryCeiling("cgroup v2", 600_000_000, 0),), "never")
    monkeypatch.setattr("octavo.planning.probe", lambda: small)
    assert main(["plan", str(smollm2_path), "--max-model-len", "8192", "--kv-cache-dtype", "f32"]) == 1
    captured = capsys.readouterr()
    assert "missing" in captured.out
    assert "bytes" in captured.err
    assert "max_model_len=" in captured.err
    assert "kv_cache_dtype=bf16" in captured.err


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "no-such-model" in captured.err


def test_pull_prints_where_the_model_is(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == str(smollm2_path)
