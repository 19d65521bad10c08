"""octavo bench serve and octavo serve understand each other in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.cli.main import main
from tests.server.running import RunningServer, server

__all__ = ["server"]

LOAD = (
    "--num-prompts 5 --input-len 12 --output-len 6 --max-concurrency 3 --tokenizer smollm2-135m --save-detailed --json"
)


def measured(server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Any, *more: str) -> dict[str, Any]:
    assert main(["bench", "serve", "--base-url", server.url, *LOAD.split(), "--result-dir", str(tmp_path), *more]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"]) == (5, 0)
    return result


@pytest.mark.parametrize(
    "more",
    [
        ("--ignore-eos",),
        ("--ignore-eos", "--continuous-usage"),
        ("--ignore-eos", "--logprobs", "1", "--top-p", "0.9", "--temperature", "0.7"),
        ("--ignore-eos", "--backend", "openai-chat", "--continuous-usage"),
        ("--backend", "tgi"),
    ],
    ids=["completions", "counts in every event", "logprobs", "chat", "tgi"],
)
def test_every_dialect_is_measured_token_by_token(
    server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Any, more: tuple[str, ...]
) -> None:
    result = measured(server, capsys, tmp_path, *more)
    lengths = result["output_lens"]
    if "--ignore-eos" in more:
        assert lengths == [6] * 5
    for length, ttft, gaps, counts, latency in zip(
        lengths, result["ttfts"], result["itls"], result["chunk_tokens"], result["latencies"], strict=True
    ):
        assert sum(counts) == length
        assert len(gaps) <= length - counts[0]
        assert 0 < ttft <= ttft + sum(gaps) <= latency + 1e-9
    if "--backend" not in more:
        assert result["server_input_tokens"] == result["total_input_tokens"] == 60


def test_the_servers_own_account_is_kept(
    server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    result = measured(server, capsys, tmp_path, "--ignore-eos")
    assert result["server"]["url"] == server.url
    assert result["server"]["max_model_len"] == 2048
    assert result["server"]["version"]
