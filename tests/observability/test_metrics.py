"""What is counted adds up, whatever happens to requests and engines, and counting never ends serving."""

from __future__ import annotations

import logging
import os
import time

import pytest

from octavo.engine.messages import EngineInfo
from octavo.errors import CapacityError, EngineDeadError
from octavo.frontend.output_processor import Processed
from octavo.observability.endpoint import metrics_text
from octavo.observability.metrics import Metrics
from octavo.server.failures import Failure, Kind
from tests.observability.scene import Reading, Scene, engine_info

GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "tgi_queue_size",
    "tgi_batch_current_size",
    "tgi_batch_current_max_tokens",
    "octavo:requests_in_flight",
    "octavo:paused_requests",
    "octavo:kv_waste_ratio",
)


def test_every_accepted_request_is_counted_once_by_the_reason_it_ended_for() -> None:
    scene = Scene()
    stopped, full, failed, left, waited, two = [scene.accept() for _ in range(5)] + [scene.accept(n=2)]
    scene.step([stopped, full, failed, left, two])
    scene.step([stopped, two], end="stop")
    scene.step([full], end="length")
    scene.step([failed], end="error")
    scene.abort(left)
    scene.abort(waited)
    seen = scene.read()
    ended = seen.by("vllm:request_success_total", "finished_reason")
    assert ended == {"stop": 2, "length": 1, "abort": 2, "error": 1, "repetition": 0}
    assert sum(ended.values()) == seen("octavo:accepted_requests_total") == 6
    for name in ("e2e_request_latency", "request_queue_time"):
        assert seen(f"vllm:{name}_seconds_count") == 6
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_n"):
        assert seen(f"vllm:{name}_count") == 6
    # Those that got a token: all but the one that waited.
    assert seen("vllm:time_to_first_token_seconds_count") == 5
    for name in ("prefill", "decode", "inference"):
        assert seen(f"vllm:request_{name}_time_seconds_count") == 5
    assert seen("vllm:request_generation_tokens_sum") == seen("vllm:generation_tokens_total") == 2 + 2 + 2 + 1 + 4
    assert seen("vllm:request_max_num_generation_tokens_sum") == 2 + 2 + 2 + 1 + 2
    assert seen("vllm:inter_token_latency_seconds_count") == 2 + 3  # two a step later, and one of each of three
    assert seen("vllm:request_time_per_output_token_seconds_count") == 4


def test_a_request_that_ends_twice_is_counted_once() -> None:
    scene = Scene()
    state = scene.accept()
    scene.step([state], end="stop")
    scene.metrics.finished(state)
    scene.abort(state)
    seen = scene.read()
    assert seen.by("vllm:request_success_total", "finished_reason")["stop"] == 1
    assert seen("vllm:e2e_request_latency_seconds_count") == 1
    assert sum(seen.by("vllm:request_success_total", "finished_reason").values()) == 1


def test_gauges_return_to_zero_when_the_only_request_is_aborted_and_no_frame_follows() -> None:
    scene = Scene()
    state = scene.accept()
    scene.step([state], referenced_blocks=4, cached_blocks=10, allocated_slots=64, used_slots=40, waiting=0)
    seen = scene.read()
    assert seen("vllm:num_requests_running") == 1
    assert seen("vllm:kv_cache_usage_perc") == 0.04
    assert seen("octavo:kv_waste_ratio") == 1 - 40 / 64
    assert seen.by("octavo:kv_blocks", "state") == {"referenced": 4, "cached": 10, "free": 86}
    scene.abort(state)
    seen = scene.read()
    assert {name: seen(name) for name in GAUGES} == dict.fromkeys(GAUGES, 0.0)
    assert seen.by("vllm:num_requests_waiting_by_reason", "reason") == {"capacity": 0, "deferred": 0}


def test_requests_the_engine_has_not_seen_yet_wait() -> None:
    scene = Scene()
    states = [scene.accept() for _ in range(3)]
    assert scene.read()("vllm:num_requests_waiting") == 3
    scene.step(states[:1], waiting=2)
    assert scene.read()("vllm:num_requests_waiting") == 2


def test_gauges_are_zero_while_no_engine_runs_and_what_waits_for_one_is_said() -> None:
    scene = Scene()
    states = [scene.accept() for _ in range(2)]
    scene.step(states, referenced_blocks=4, allocated_slots=64, used_slots=40)
    scene.lose_engine(replayed=2)
    seen = scene.read()
    assert seen("octavo:engine_up") == 0
    assert seen("vllm:num_requests_running") == seen("vllm:kv_cache_usage_perc") == seen("octavo:kv_waste_ratio") == 0
    assert seen("vllm:num_requests_waiting") == 2  # for the next engine
    for state in states:
        scene.abort(state)
    seen = scene.read()
    assert {name: seen(name) for name in GAUGES} == dict.fromkeys(GAUGES, 0.0)


@pytest.mark.parametrize("order", ["lost, then started", "started, then lost", "not told"])
def test_totals_go_on_rising_when_an_engine_starts_again_at_zero(order: str) -> None:
    scene = Scene()
    state, other = scene.accept(prompt_tokens=20, cached=16), scene.accept(prompt_tokens=7)
    for _ in range(3):
        scene.step(
            [state, other],
            prefix_queries=27,
            prefix_hits=16,
            preemptions=1,
            evictions=2,
            busy_seconds=3.0,
            prefill_tokens=11,
        )
    before = scene.read()
    assert before("vllm:num_preemptions_total") == 1
    if order == "lost, then started":
        scene.lose_engine(replayed=1, failed=[other])
        scene.metrics.engine_started(engine_info(4243))
    elif order == "started, then lost":
        scene.metrics.engine_started(engine_info(4243))
        scene.lose_engine(replayed=1, failed=[other])
    else:
        scene.abort(other)
        scene.stats = type(scene.stats)(num_blocks=100)
    scene.step([state], prefix_queries=20, prefix_hits=0, preemptions=2, evictions=0, busy_seconds=1.0)
    after = scene.read()
    assert after("octavo:engine_up") == 1
    assert after("vllm:num_preemptions_total") == 3
    assert after("vllm:prefix_cache_queries_total") == 47
    assert after("vllm:prefix_cache_hits_total") == 16
    assert after("octavo:prefix_evictions_total") == 2
    assert after("octavo:engine_busy_seconds_total") == 4.0
    assert after("octavo:steps_total") == 4
    falling = [
        key
        for key, value in before.series.items()
        if (key[0].endswith(("_total", "_count", "_sum", "_bucket")) or before.kinds.get(key[0]) == "counter")
        and after.series.get(key, 0.0) < value
        and not key[0].startswith(("process_", "python_"))
    ]
    assert falling == []
    # The replay is not a second request: one first token, its prompt counted once.
    assert after("vllm:time_to_first_token_seconds_count") == 2
    assert after("vllm:prompt_tokens_total") == 27
    assert after.by("vllm:prompt_tokens_by_source_total", "source") == {
        "local_compute": 11,
        "local_cache_hit": 16,
        "external_kv_transfer": 0,
    }
    if order != "not told":
        assert after("octavo:engine_restarts_total") == after("octavo:replays_total") == 1
        assert after("octavo:lost_requests_total") == 1
        assert after.by("tgi_request_failure", "err")["incomplete"] == 1


def test_a_paused_request_is_neither_running_nor_waiting() -> None:
    scene = Scene()
    state = scene.accept(n=2)
    scene.step([state])
    assert scene.read()("vllm:num_requests_running") == 2
    scene.metrics.paused(state)
    seen = scene.read()
    assert seen("octavo:paused_requests") == seen("octavo:pauses_total") == 1
    assert seen("vllm:num_requests_running") == seen("vllm:num_requests_waiting") == 0
    scene.metrics.resumed(state)
    assert scene.read()("octavo:paused_requests") == 0
    scene.metrics.paused(state)
    scene.abort(state)
    seen = scene.read()
    assert (seen("octavo:paused_requests"), seen("octavo:pauses_total")) == (0, 2)


def test_the_time_of_a_request_is_split_at_its_first_step_and_its_first_and_last_token() -> None:
    scene = Scene()
    start = time.monotonic() - 100
    state = scene.accept()
    scene.step([state])
    scene.step([state])
    state.sequences[0].finish_reason = "stop"
    metrics = state.metrics
    metrics.arrival_time, metrics.scheduled_time, metrics.first_token_time = start, start + 1, start + 3
    metrics.last_token_time, metrics.finished_time = start + 7, start + 8
    before = scene.read()
    scene.metrics.finished(state)
    after = scene.read()
    spent = {
        name: round(after(f"vllm:{name}_seconds_sum") - before(f"vllm:{name}_seconds_sum"), 6)
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "e2e_request_latency",
            "request_time_per_output_token",
        )
    }
    assert spent == {
        "request_queue_time": 1.0,
        "request_prefill_time": 2.0,
        "request_decode_time": 4.0,
        "request_inference_time": 6.0,
        "e2e_request_latency": 8.0,
        "request_time_per_output_token": 4.0,
    }


def test_no_duration_is_as_long_as_the_machine_has_run() -> None:
    scene = Scene()
    states = [scene.accept() for _ in range(4)]
    scene.step(states)
    scene.step(states, end="stop")
    scene.abort(scene.accept())
    seen = scene.read()
    for (name, _), value in seen.series.items():
        if name.endswith("_seconds_sum") or name.endswith("duration_sum"):
            assert 0 <= value < 60, name


def test_refusals_timeouts_and_failures_are_told_apart() -> None:
    metrics = Metrics("m")
    metrics.failed(Failure(Kind.invalid, "n"), ValueError())
    metrics.failed(Failure(Kind.invalid, "no", code="template"))
    metrics.failed(Failure(Kind.overloaded, "no"))
    metrics.failed(Failure(Kind.unavailable, "draining"))
    metrics.failed(Failure(Kind.queue_timeout, "late"))
    metrics.failed(Failure(Kind.timeout, "late"))
    metrics.failed(Failure(Kind.internal, "bug"))
    # The engine had accepted these.
    metrics.failed(Failure(Kind.unavailable, "dead"), EngineDeadError("dead"))
    metrics.failed(Failure(Kind.invalid, "too long"), CapacityError("too long", needed=9, available=2))
    metrics.client_gone()
    seen = Reading(metrics_text(metrics).decode())
    refused = {name: count for name, count in seen.by("octavo:refused_requests_total", "reason").items() if count}
    assert refused == {"invalid": 1, "template": 1, "overloaded": 1, "unavailable": 1}
    assert seen.by("octavo:request_timeouts_total", "limit") == {"queue": 1, "total": 1}
    assert seen.by("octavo:failed_requests_total", "kind") == {
        "generation": 0,
        "internal": 1,
        "unavailable": 1,
        "invalid": 1,
    }
    assert seen("octavo:client_disconnects_total") == 1


def test_tgi_counts_every_request_as_a_success_or_a_failure_or_still_running() -> None:
    scene = Scene()
    ok, full, bad, left, running = [scene.accept() for _ in range(5)]
    scene.step([ok, full, bad, left, running])
    scene.step([ok], end="stop")
    scene.step([full], end="length")
    scene.step([bad], end="error")
    scene.abort(left)
    for kind in (Kind.invalid, Kind.overloaded, Kind.too_large, Kind.unavailable):
        scene.metrics.failed(Failure(kind, "no"))
    scene.metrics.failed(Failure(Kind.invalid, "no", code="template"))
    seen = scene.read()
    failures = seen.by("tgi_request_failure", "err")
    assert failures == {
        "validation": 2,
        "template": 1,
        "overloaded": 2,
        "dropped": 1,
        "incomplete": 0,
        "generation": 1,
    }
    assert seen("tgi_request_success") == 2
    live = seen("octavo:requests_in_flight")
    assert seen("tgi_request_count") == 2 + sum(failures.values()) + live == 10


def test_http_requests_are_counted_by_handler_method_and_class_of_status() -> None:
    metrics = Metrics("m")
    metrics.http_request("POST", "/v1/completions", 200, 0.3, 100, 1000)
    metrics.http_request("POST", "/v1/completions", 429, 0.001, 50, 10)
    metrics.http_request("GET", "none", 404, 0.001)
    metrics.http_request('\n"evil', "none", 405, 0.001)
    metrics.http_request("GET", "/metrics", 200, 0.001)
    seen = Reading(metrics_text(metrics).decode())
    assert seen("http_requests_total", handler="/v1/completions", method="POST", status="2xx") == 1
    assert seen("http_requests_total", handler="/v1/completions", method="POST", status="4xx") == 1
    assert seen("http_requests_total", handler="none", method="other") == 1
    assert seen.all("http_requests_total", handler="/metrics") == []
    assert seen("http_request_duration_seconds_bucket", handler="/v1/completions", le="0.1") == 1
    assert seen("http_request_duration_highr_seconds_count") == 4
    assert seen("http_request_size_bytes_sum", handler="/v1/completions") == 150
    assert seen("http_response_size_bytes_count", handler="/v1/completions") == 2


def test_a_fault_in_counting_is_logged_once_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    state = scene.accept()
    scene.metrics.numbers.iteration_tokens.counts.clear()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            scene.step([state])
        scene.metrics.stepped(None, Processed())  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    scene.step([state], end="stop")
    assert scene.metrics.numbers.faults == 5
    assert scene.read().by("vllm:request_success_total", "finished_reason")["stop"] == 1


def test_a_gauge_that_fails_leaves_the_other_names_there(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("m")
    metrics.gauge("octavo:open_connections", "Connections.", lambda: 7)
    assert Reading(metrics_text(metrics).decode())("octavo:open_connections") == 7

    def broken() -> float:
        raise OSError("gone")

    metrics.gauge("octavo:broken", "Fails.", broken)
    seen = Reading(metrics_text(metrics).decode())
    assert "vllm:num_requests_running" in seen.names
    assert "process_cpu_seconds_total" in seen.names
    assert len(caplog.records) == 1


def test_idle_time_is_what_steps_leave_of_the_uptime_of_all_engines() -> None:
    now = [1000.0]
    scene = Scene(Metrics("m", clock=lambda: now[0]))
    now[0] += 10
    scene.step([], busy_seconds=2.5)
    seen = scene.read()
    assert seen("octavo:engine_uptime_seconds_total") == 10
    assert seen("octavo:engine_idle_ratio") == 0.75
    scene.lose_engine(0)
    now[0] += 5  # no engine: neither busy nor idle
    scene.metrics.engine_started(engine_info())
    now[0] += 10
    seen = scene.read()
    assert seen("octavo:engine_uptime_seconds_total") == 20
    assert seen("octavo:engine_idle_ratio") == 0.875


def test_the_process_of_the_engine_is_shown_beside_the_servers() -> None:
    metrics = Metrics("m")
    metrics.engine_started(EngineInfo(os.getppid(), 1, 1, 1, 16, "", {}, {}))
    names = Reading(metrics_text(metrics).decode()).names
    assert {"process_resident_memory_bytes", "octavo_engine_process_resident_memory_bytes"} <= names
    metrics.engine_started(EngineInfo(os.getpid(), 1, 1, 1, 16, "", {}, {}))
    assert "octavo_engine_process_resident_memory_bytes" not in Reading(metrics_text(metrics).decode()).names


def test_tile_choices_are_those_of_the_engine_that_runs() -> None:
    metrics = Metrics("m")
    assert Reading(metrics_text(metrics).decode()).by("octavo:tile_choices", "tuning") == {"hit": 0, "miss": 0}
    metrics.engine_started(EngineInfo(os.getpid(), 1, 1, 1, 16, "", {}, {}, "v4", 2, 20, 9))
    assert Reading(metrics_text(metrics).decode()).by("octavo:tile_choices", "tuning") == {"hit": 20, "miss": 9}


def test_names_of_models_are_escaped() -> None:
    metrics = Metrics('a "quoted"\\name\n')
    seen = Reading(metrics_text(metrics).decode())
    assert seen("vllm:num_requests_running", model_name='a "quoted"\\name\n') == 0
