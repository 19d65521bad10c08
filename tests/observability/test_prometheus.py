"""A real Prometheus with the shipped configuration scrapes a real server, and the queries of the board return data."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.observability.boards import BOARD, ROOT, filled, load, queries
from tests.observability.test_boards import VLLM_BOARD
from tests.server.running import RunningServer

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (apt-get install prometheus)")

KEY = "key-of-prometheus"
WINDOW = "30s"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(separate_process=True, api_key=(f"prometheus:{KEY}",)) as running:
        yield running


class Prometheus:
    """A Prometheus on a free port of the loopback, with its data in a folder of the test."""

    def __init__(self, folder: Path, target: str) -> None:
        source = ROOT / "deploy/prometheus"
        shutil.copy(source / "alerts.yml", folder)
        (folder / "octavo.key").write_text(KEY)
        text = (source / "prometheus.yml").read_text()
        # Where the server is and its key, and not ten seconds between two scrapes: the rest stays as shipped.
        text = text.replace("127.0.0.1:8000", target).replace("_interval: 10s", "_interval: 1s")
        text = text.replace("# authorization:", "authorization:")
        text = text.replace(
            "#   credentials_file: /etc/prometheus/octavo.key", f"  credentials_file: {folder}/octavo.key"
        )
        (folder / "prometheus.yml").write_text(text)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert PROMETHEUS is not None
        command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.size=50MB", "--log.level=warn"]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, "GOMAXPROCS": "1"}
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10)

    def get(self, path: str, **params: str) -> Any:
        answer = self.client.get(path, params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        found = self.get("/query", query=expression)["result"]
        return [(item["metric"], float(item["value"][1])) for item in found]

    def wait(self, condition: str) -> None:
        """Until this query returns something."""
        for _ in range(150):
            try:
                if self.query(condition):
                    return
            except (httpx.TransportError, ValueError):  # not listening yet, or saying in plain text that it is starting
                assert self.process.poll() is None, Path(self.log.name).read_text()
            time.sleep(0.2)
        raise AssertionError(f"{condition} returned nothing; targets: {self.get('/targets')}")

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


@pytest.fixture(scope="module")
def prometheus(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
    try:
        running.wait("up == 1")
        _traffic(server)
        running.wait("vllm:request_success_total > 3")
        running.wait(f"rate(vllm:generation_tokens_total[{WINDOW}]) > 0")
        running.wait(f"rate(http_requests_total[{WINDOW}])")  # these series begin with the first request
        running.wait(f"rate(octavo:refused_requests_total{{reason='unauthorized'}}[{WINDOW}])")
        yield running
    finally:
        running.close()


def _traffic(server: RunningServer) -> None:
    with server.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        for _ in range(4):
            body = {"prompt": "Once upon a time there was a", "max_tokens": 12, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json={"prompt": 7}).status_code == 400
        assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_the_target_is_up_and_its_text_is_understood(prometheus: Prometheus) -> None:
    (target,) = prometheus.get("/targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    kinds = prometheus.get("/metadata")
    assert kinds["vllm:time_to_first_token_seconds"][0]["type"] == "histogram"
    assert kinds["tgi_request_count"][0]["type"] == "counter"


@pytest.mark.parametrize("query", queries(load(BOARD)))
def test_every_query_of_the_board_returns_data(prometheus: Prometheus, query: str) -> None:
    if ">" in query:  # an annotation: only where something happened
        query = query.partition(">")[0]
    assert prometheus.query(filled(query, WINDOW)), query


@pytest.mark.parametrize("panel", VLLM_BOARD)
def test_every_panel_of_vllms_board_shows_data(prometheus: Prometheus, panel: str) -> None:
    for query in VLLM_BOARD[panel]:
        assert prometheus.query(filled(query, WINDOW)), query


def test_the_numbers_are_those_of_the_traffic(prometheus: Prometheus, server: RunningServer) -> None:
    # Compared with what the server says itself: totals, so nothing depends on when the scrapes were.
    assert prometheus.query("sum(vllm:request_success_total)")[0][1] >= 4
    assert prometheus.query('octavo:refused_requests_total{reason="invalid"}')[0][1] >= 1
    assert prometheus.query('octavo:refused_requests_total{reason="unauthorized"}')[0][1] >= 1
    assert prometheus.query('http_requests_total{handler="/v1/completions",status="2xx"}')[0][1] >= 4
    quantile = "histogram_quantile(0.5, sum by(le) (vllm:time_to_first_token_seconds_bucket))"
    assert math.isfinite(prometheus.query(quantile)[0][1])


def test_the_variables_of_the_board_find_their_values(prometheus: Prometheus, server: RunningServer) -> None:
    assert prometheus.get("/label/model_name/values") == server.serving.model_names[:1]
    assert prometheus.get("/label/instance/values") == [server.url.removeprefix("http://")]


def test_the_alerts_are_loaded_and_none_fires(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("/rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(
        re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/alerts.yml").read_text())
    )
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    assert json.dumps(rules).count('"lastError"') == 0
