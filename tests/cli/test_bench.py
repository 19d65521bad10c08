"""The measurements measure what they name and record what the figures depend on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.benchmarking.workload import random_prompts
from octavo.cli.bench.machine import thread_counts
from octavo.cli.main import main
from tests.cli.fakes import FakeLLM, FakeTokenizer, install


def measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[dict[str, Any], FakeLLM]:
    llm = install(monkeypatch, FakeLLM([]))
    assert main(["bench", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out), llm


def test_prompts_are_repeatable_and_of_exact_length() -> None:
    first = random_prompts(FakeTokenizer(), 3, 40, seed=1)
    assert first == random_prompts(FakeTokenizer(), 3, 40, seed=1)
    assert [len(prompt) for prompt in first] == [40, 40, 40]
    assert len({tuple(prompt) for prompt in first + random_prompts(FakeTokenizer(), 3, 40, seed=2)}) == 6


def test_latency_reports_speed_of_one_stream(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, llm = measured(
        capsys, monkeypatch, "latency", "--input-len", "9", "--output-len", "5", "--rounds", "2", "-q", "w8"
    )
    assert record["decode_tok_s"] > 0
    assert record["ttft_s"] > 0
    assert record["itl_ms"] > 0
    assert len(record["rounds"]) == 2
    assert record["form"] == "w8"
    assert [len(prompt) for prompt in llm.prompts] == [9, 9, 9]
    assert llm.params[0].ignore_eos
    assert llm.closed


def test_prefill_reports_speed_of_a_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    record, llm = measured(capsys, monkeypatch, "prefill", "--input-len", "30", "--rounds", "1")
    assert record["prefill_tok_s"] == pytest.approx(30 / record["prefill_s"])
    assert llm.params[0].max_tokens == 1


def test_throughput_counts_prompts_and_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--num-prompts 4 --input-len 30 --output-len 6 --rounds 1 --max-num-seqs 2"
    record, llm = measured(capsys, monkeypatch, "throughput", *options.split())
    assert record["total_tok_s"] == pytest.approx(4 * 36 / record["wall_s"])
    assert record["output_tok_s"] == pytest.approx(4 * 6 / record["wall_s"])
    assert len(llm.prompts) == 8
    assert llm.settings["max_num_seqs"] == 2


def test_a_record_holds_all_that_the_figures_depend_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = measured(capsys, monkeypatch, "prefill", "--rounds", "1", "--threads", "2")
    assert {"machine", "versions", "model", "form", "command", "date", "input_len"} <= record.keys()
    assert len(record["model_sha256"]) == 64
    assert {"cpu", "isa", "threads", "memory_bytes", "huge_pages"} <= record["machine"].keys()
    assert record["machine"]["threads"] == 2
    assert {"octavo", "python", "numpy"} <= record["versions"].keys()


def test_figures_are_readable_without_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeLLM([]))
    assert main(["bench", "prefill", "--rounds", "2"]) == 0
    assert "median of 2" in capsys.readouterr().out


def test_a_length_beyond_the_model_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = install(monkeypatch, FakeLLM([], max_model_len=100))
    assert main(["bench", "prefill", "--input-len", "100"]) == 2
    assert "100" in capsys.readouterr().err
    assert llm.closed


@pytest.mark.parametrize("benchmark", ["latency", "prefill", "throughput"])
def test_the_profile_is_printed_beside_the_figures_and_kept_in_the_record(
    benchmark: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = install(monkeypatch, FakeLLM([]))
    monkeypatch.setattr("octavo.cli.profile.machine_peaks", lambda threads: {"dram_GBps": 50.0, "int8_GOPS": 400.0})
    assert main(["bench", benchmark, "--rounds", "1", "--profile", "--json"]) == 0
    printed = capsys.readouterr()
    assert "linear" in printed.err
    assert llm.profile_resets == 1  # the round that is not counted is not profiled either
    profile = json.loads(printed.out)["profile"]
    assert profile["peaks"] == {"dram_GBps": 50.0, "int8_GOPS": 400.0}
    (step,) = profile["steps"]
    assert step["phases_ms"]["native"] == 4.0
    norm, linear = step["operations"]
    assert (linear["peak_share"], linear["peak"]) == (0.4, "dram")  # 25 % of the arithmetic, 40 % of the bandwidth
    assert (norm["peak_share"], norm["peak"]) == (None, None)  # no L3 bandwidth was measured


def test_a_record_without_a_profile_has_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeLLM([]))
    assert main(["bench", "latency", "--rounds", "1", "--json"]) == 0
    assert "profile" not in json.loads(capsys.readouterr().out)


def test_the_machine_itself_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "machine", "--json", "--threads", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    names = ("dram_GBps", "l3_GBps", "l2_GBps", "fp32_GFLOPS", "bf16_GFLOPS", "int8_GOPS")
    assert all(record[name] > 0 for name in names)
    assert record["by_threads"] == [{"threads": 1, **{name: record[name] for name in names}}]


def test_the_machine_is_measured_at_growing_numbers_of_threads() -> None:
    assert [thread_counts(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
