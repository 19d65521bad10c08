"""octavo bench serve: its flags, what it prints and writes, and what it says of mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.benchmarking.fake_server import FakeServer

SMALL = ["--num-prompts", "4", "--input-len", "5", "--output-len", "3", "--tokenizer", "smollm2-135m"]


def bench(*arguments: str) -> int:
    return main(["bench", "serve", *arguments])


def test_a_server_is_measured_by_its_url(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert bench("--base-url", server.url, *SMALL, "--goodput", "ttft:60000", "e2el:60000") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("============ Serving Benchmark Result ============")
    assert "Successful requests:                     4" in printed.out
    assert "Request goodput (req/s):" in printed.out
    assert "\x1b" not in printed.err  # no live view where no terminal is


def test_host_and_port_name_a_server_too() -> None:
    with FakeServer() as server:
        assert bench("--host", "127.0.0.1", "--port", str(server.port), *SMALL) == 0
        assert len(server.bodies) == 4


def test_the_record_says_all_that_the_figures_depend_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--label", "mine", "--api-key", "secret", "--metadata", "note=x", "--max-concurrency", "2"]
    with FakeServer() as server:
        every = ["--base-url", server.url, *SMALL, *arguments, "--save-detailed", "--result-dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", ["octavo", "bench", "serve", *every])
        assert bench(*every, "--json") == 0
        assert "Authorization: Bearer secret" in server.heads[0]
    shown = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("mine-infqps-concurrency2-fake-")
    kept = json.loads(path.read_text())
    assert kept == shown
    assert {"machine", "versions", "command", "date", "model_id", "server", "recorded", "itls"} <= kept.keys()
    assert kept["note"] == "x"
    assert "secret" not in path.read_text()


def test_results_can_be_added_line_by_line(tmp_path: Path) -> None:
    with FakeServer() as server:
        for _ in range(2):
            kept = ["--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.jsonl"]
            assert bench("--base-url", server.url, *SMALL, *kept) == 0
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [4, 4]


def test_servers_are_compared_and_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "out" / "report.html"
    with FakeServer() as one, FakeServer() as other:
        named = ["--compare", f"{one.url}=ours", f"{other.url}=theirs"]
        kept = ["--report", str(page), "--save-result", "--result-dir", str(tmp_path)]
        assert bench(*SMALL, "--rounds", "2", "--sweep", "1,2", *kept, *named) == 0
        assert len(one.bodies) == len(other.bodies) == 16
    assert "ours over the others; medians of 2 rounds" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    record = json.loads((tmp_path / "report.json").read_text())
    assert record["levels"] == ["concurrency 1", "concurrency 2"]
    assert len(record["runs"]) == 8
    assert {"machine", "versions", "command"} <= record.keys()


def test_a_scenario_sets_what_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        given = ["--num-prompts", "2", "--request-rate", "inf", "--backend", "openai", "--tokenizer", "smollm2-135m"]
        assert bench("--base-url", server.url, "--scenario", "voice", *given, "--json") == 0
        bodies = server.bodies
    assert len(bodies) == 2
    assert all(body["ignore_eos"] for body in bodies)
    result = json.loads(capsys.readouterr().out)
    assert result["max_concurrency"] == 16
    assert result["request_goodput"] is not None


def test_failures_end_with_an_error_code_and_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(status=500) as server:
        assert bench("--base-url", server.url, *SMALL) == 1
    assert "HTTP 500" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        url = server.url
    assert bench("--base-url", url, *SMALL) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "cannot connect" in error[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:1"], "belongs to no option"),
        (["ttft:5"], "belongs to no option"),
        (["--compare", "http://127.0.0.1:1=a", "http://127.0.0.1:2=a"], "two servers"),
        (["--compare", "http://127.0.0.1:1", "--base-url", "http://127.0.0.1:2"], "exclude"),
        (["--sweep", "1,x"], "numbers"),
        (["--sweep", "1", "--sweep-rate", "1"], "exclude"),
        (["--backend", "grpc"], "backend"),
        (["--base-url", "nothing://x"], "URL"),
        (["--extra-body", "[1]"], "extra_body"),
        (["--burstiness", "0"], "burstiness"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with FakeServer() as server:
        where = [] if "--compare" in arguments or "--base-url" in arguments else ["--base-url", server.url]
        assert bench(*where, *arguments, *SMALL) == 2
    assert said in capsys.readouterr().err
