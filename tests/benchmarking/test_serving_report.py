"""The comparison of servers over HTTP: medians with their spread, ratios within a round, and what is a target met."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts, imported from where they are run."""
    pytest.importorskip("psutil")
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("recording", "http_client", "load_generator", "server_process", "serving_report", "serving")
    found = {name: __import__(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return SimpleNamespace(**found)


def _run(rate: float, ttft: float, **more: Any) -> dict[str, Any]:
    return {"req_per_s": rate, "ttft_ms": {"p50": ttft, "p99": 2 * ttft}, "failed": 0, **more}


def _column(scripts: Any, title: str) -> Any:
    return next(column for column in scripts.serving_report.COLUMNS if column.title == title)


def test_the_middle_of_the_rounds_is_reported_with_their_spread(scripts: Any) -> None:
    runs = [_run(4.0, 100), _run(5.0, 100), _run(6.0, 100)]
    assert scripts.serving_report.middle(runs, _column(scripts, "req/s")) == (5.0, pytest.approx(0.4))
    assert scripts.serving_report.middle(runs, _column(scripts, "RSS MB")) is None


def test_ratios_are_those_of_runs_of_the_same_round(scripts: Any) -> None:
    ours, theirs = [_run(4.0, 100), _run(9.0, 300)], [_run(2.0, 400), _run(3.0, 600)]
    assert scripts.serving_report.ratios(ours, theirs, _column(scripts, "req/s")) == (2.5, 2.0, 3.0)
    assert scripts.serving_report.ratios(ours, theirs, _column(scripts, "TTFT p99")) == (0.375, 0.25, 0.5)


def test_more_is_better_for_rates_and_less_for_times(scripts: Any) -> None:
    rate, time = _column(scripts, "req/s"), _column(scripts, "TTFT p99")
    assert [rate.met(ratio) for ratio in (1.9, 2.0)] == [False, True]
    assert [time.met(ratio) for ratio in (0.5, 0.6)] == [True, False]
    assert _column(scripts, "TTFT p50").met(0.1) is None


def test_every_form_is_held_against_every_other_server(scripts: Any) -> None:
    servers = {
        "octavo w4": [_run(6.0, 100, peak_rss_bytes=4e8, front_end_share=0.02)],
        "octavo w8": [_run(5.0, 100)],
        "vllm bf16": [_run(3.0, 300, peak_rss_bytes=7e9)],
        "llama-server Q4_0": [_run(2.0, 900)],
    }
    shown = scripts.serving_report.table_of_ratios(servers)
    for pair in ("w4 / vllm bf16", "w4 / llama-server Q4_0", "w8 / vllm bf16", "w8 / llama-server Q4_0"):
        assert f"octavo {pair}" in shown
    line = next(line for line in shown.splitlines() if "w4 / vllm" in line)
    assert "+ 2.00 (2.00 to 2.00)" in line
    assert "+ 0.06 (0.06 to 0.06)" in line
    assert "    -" in line  # what was not measured
    assert "2.0" in scripts.serving_report.table(servers)


def test_a_form_this_octavo_does_not_have_is_left_out(
    scripts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m-Q4_1.gguf").touch()
    monkeypatch.setattr(scripts.serving, "_known", lambda form: form != "w8")
    options = scripts.serving.parse(["--models", str(tmp_path), "--name", "m", "--only", "w4,w8"])
    assert [server.name for server in scripts.serving.servers(options)] == ["octavo w4", "octavo w8-wide"]
    assert "octavo w8 (this octavo has no such form)" in capsys.readouterr().out
