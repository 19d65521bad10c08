"""The boards and alerts name series that are exported: octavo's own, and those made for vLLM, unchanged."""

from __future__ import annotations

import os
import re

import pytest

from octavo.engine.messages import EngineInfo
from tests.observability.boards import BOARD, ROOT, load, names, panels, queries
from tests.observability.scene import Reading, Scene

S = '{model_name="$model_name"}'
R = "[$__rate_interval]"


def _quantiles(name: str) -> list[str]:
    found = [f"histogram_quantile({q}, sum by(le) (rate({name}_bucket{S}{R})))" for q in (0.99, 0.95, 0.9, 0.5)]
    return [*found, f"rate({name}_sum{S}{R}) / rate({name}_count{S}{R})"]


# What the board that vLLM ships asks for, panel by panel.
VLLM_BOARD = {
    "E2E Request Latency": _quantiles("vllm:e2e_request_latency_seconds"),
    "Token Throughput": [f"rate(vllm:prompt_tokens_total{S}{R})", f"rate(vllm:generation_tokens_total{S}{R})"],
    "Inter Token Latency": _quantiles("vllm:inter_token_latency_seconds"),
    "Scheduler State": [f"vllm:num_requests_running{S}", f"vllm:num_requests_waiting{S}"],
    "Time To First Token Latency": _quantiles("vllm:time_to_first_token_seconds"),
    "Cache Utilization": [f"vllm:kv_cache_usage_perc{S}"],
    "Request Prompt Length": [f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{S}{R}))"],
    "Request Generation Length": [f"sum by(le) (increase(vllm:request_generation_tokens_bucket{S}{R}))"],
    "Finish Reason": [f"sum by(finished_reason) (increase(vllm:request_success_total{S}{R}))"],
    "Queue Time": [f"rate(vllm:request_queue_time_seconds_sum{S}{R})"],
    "Requests Prefill and Decode Time": [
        f"rate(vllm:request_prefill_time_seconds_sum{S}{R})",
        f"rate(vllm:request_decode_time_seconds_sum{S}{R})",
    ],
    "Max Generation Token in Sequence Group": [f"rate(vllm:request_max_num_generation_tokens_sum{S}{R})"],
}


@pytest.fixture(scope="module")
def seen() -> Reading:
    scene = Scene()
    # Any process but this one stands for the engine's.
    scene.metrics.engine_started(EngineInfo(os.getppid(), 10, 2048, 100, 16, "", {}, {}))
    scene.metrics.http_request("POST", "/v1/completions", 200, 0.1)
    return scene.read()


@pytest.mark.parametrize("panel", VLLM_BOARD)
def test_the_board_of_vllm_works_unchanged(seen: Reading, panel: str) -> None:
    for query in VLLM_BOARD[panel]:
        for name in names(query):
            assert seen.all(name, model_name="the-model"), name


def test_boards_made_for_older_releases_of_vllm_find_the_names_of_then(seen: Reading) -> None:
    usage = seen("vllm:kv_cache_usage_perc", model_name="the-model")
    assert seen("vllm:gpu_cache_usage_perc", model_name="the-model") == usage
    old, new = "vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"
    for suffix in ("_bucket", "_sum", "_count"):
        assert [value for _, value in seen.all(old + suffix)] == [value for _, value in seen.all(new + suffix)]


def test_every_query_of_the_board_names_exported_series(seen: Reading) -> None:
    board = load(BOARD)
    asked = {query: names(query) for query in queries(board)}
    assert len(asked) > 50
    for query, found in asked.items():
        assert found, query
        assert found <= seen.names, f"{query}: {found - seen.names}"
        for name, labels in re.findall(r"([a-z_:]+)\{([^}]*)\}", query):
            for label in re.findall(r"(\w+)=", labels):
                if label != "instance":  # Prometheus adds it
                    assert all(label in known for known, _ in seen.all(name)), f"{name} has no {label}"


def test_the_board_can_be_imported() -> None:
    board = load(BOARD)
    shown = panels(board)
    assert board["uid"] == board["title"].lower() == "octavo"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {item["name"] for item in board["templating"]["list"]}
    assert variables == {"DS_PROMETHEUS", "model_name", "instance"}
    for panel in shown:
        assert panel["title"]
        assert panel["description"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    for query in queries(board):
        assert query.count("(") == query.count(")")
        assert set(re.findall(r"\$(\w+)", query)) <= {"model_name", "instance", "__rate_interval"}


def test_panels_do_not_lie_on_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in load(BOARD)["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_every_octavo_name_is_on_the_board_or_in_an_alert_or_says_something_constant(seen: Reading) -> None:
    text = BOARD.read_text() + (ROOT / "deploy/prometheus/alerts.yml").read_text()
    families = {name for name in seen.kinds if name.startswith("octavo:")}
    constant = {"octavo:build_info", "octavo:engine_idle_ratio", "octavo:accepted_requests", "octavo:kv_slots"}
    constant |= {"octavo:tile_choices"}  # a matter of the start, told in its report
    assert {name for name in families if name not in text} == constant


def test_alerts_name_exported_series(seen: Reading) -> None:
    text = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    expressions = re.findall(r"expr: (.+)", text)
    assert len(expressions) >= 8
    for expression in expressions:
        assert names(expression) <= seen.names, expression
