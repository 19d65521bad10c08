"""The names, labels and buckets are those of vLLM and TGI, to the letter."""

from __future__ import annotations

import re

import pytest

from octavo.observability.metrics import Metrics
from tests.observability.boards import ROOT
from tests.observability.scene import Reading, Scene, engine_info

REASONS = ("stop", "length", "abort", "error", "repetition")

# Name: kind, the label beside model_name and engine, and its values.
VLLM = {
    "num_requests_running": ("gauge", "", ()),
    "num_requests_waiting": ("gauge", "", ()),
    "num_requests_waiting_by_reason": ("gauge", "reason", ("capacity", "deferred")),
    "kv_cache_usage_perc": ("gauge", "", ()),
    "engine_sleep_state": ("gauge", "sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "prefix_cache_queries": ("counter", "", ()),
    "prefix_cache_hits": ("counter", "", ()),
    "num_preemptions": ("counter", "", ()),
    "prompt_tokens": ("counter", "", ()),
    "prompt_tokens_by_source": (
        "counter",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached": ("counter", "", ()),
    "generation_tokens": ("counter", "", ()),
    "request_success": ("counter", "finished_reason", REASONS),
}

LENGTHS = "1 2 5 10 20 50 100 200 500 1000 2000"  # max_model_len is 2048
E2E = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
ITL = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
VLLM_HISTOGRAMS = {
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_max_num_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_prefill_kv_computed_tokens": LENGTHS,
    "request_params_n": "1 2 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": ITL,
    "request_time_per_output_token_seconds": ITL,
    "e2e_request_latency_seconds": E2E,
    "request_queue_time_seconds": E2E,
    "request_inference_time_seconds": E2E,
    "request_prefill_time_seconds": E2E,
    "request_decode_time_seconds": E2E,
}

TGI = {
    "tgi_request_count": "counter",
    "tgi_request_success": "counter",
    "tgi_request_failure": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_request_skipped_tokens": "histogram",
    "tgi_queue_size": "gauge",
    "tgi_batch_current_size": "gauge",
    "tgi_batch_current_max_tokens": "gauge",
    "tgi_batch_total_tokens": "gauge",
    "tgi_batch_next_size": "histogram",
    "tgi_batch_inference_count": "counter",
    "tgi_batch_inference_success": "counter",
    "tgi_batch_inference_duration": "histogram",
    "tgi_batch_forward_duration": "histogram",
    "tgi_batch_decode_duration": "histogram",
    "tgi_batch_filter_duration": "histogram",
    "tgi_batch_concat": "counter",
    "tgi_batch_concat_duration": "histogram",
}


@pytest.fixture(scope="module")
def seen() -> Reading:
    scene = Scene()
    states = [scene.accept(prompt_tokens=30, cached=16), scene.accept(n=2)]
    scene.step(states, prefill_tokens=40, decode_tokens=2, running=3)
    for _ in range(5):
        scene.step(states)
    scene.step(states, end="stop")
    return scene.read()


def bounds(seen: Reading, name: str, **labels: str) -> list[float]:
    return sorted(float(found["le"]) for found, _ in seen.all(f"{name}_bucket", **labels))


@pytest.mark.parametrize("name", VLLM)
def test_counters_and_gauges_of_vllm(seen: Reading, name: str) -> None:
    kind, label, values = VLLM[name]
    assert seen.kinds[f"vllm:{name}"] == kind
    sample = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
    found = [labels for labels, _ in seen.all(sample)]
    base = {"model_name": "the-model", "engine": "0"}
    assert found == ([{**base, label: value} for value in values] if label else [base])


@pytest.mark.parametrize("name", VLLM_HISTOGRAMS)
def test_histograms_of_vllm(seen: Reading, name: str) -> None:
    expected = [float(bound) for bound in VLLM_HISTOGRAMS[name].split()] + [float("inf")]
    assert seen.kinds[f"vllm:{name}"] == "histogram"
    assert bounds(seen, f"vllm:{name}", model_name="the-model", engine="0") == expected
    count = seen(f"vllm:{name}_count", model_name="the-model", engine="0")
    assert count == seen(f"vllm:{name}_bucket", le="+Inf") > 0
    assert seen(f"vllm:{name}_sum", model_name="the-model", engine="0") >= 0


def test_bounds_are_written_as_vllm_writes_them(seen: Reading) -> None:
    edges = [labels["le"] for labels, _ in seen.all("vllm:time_to_first_token_seconds_bucket")]
    assert edges[:4] == ["0.001", "0.005", "0.01", "0.02"]
    assert edges[-4:] == ["160.0", "640.0", "2560.0", "+Inf"]


def test_the_settings_of_the_cache_are_labels(seen: Reading) -> None:
    ((labels, value),) = seen.all("vllm:cache_config_info")
    assert value == 1
    assert (labels["block_size"], labels["num_gpu_blocks"], labels["engine"]) == ("16", "100", "0")
    assert (labels["enable_prefix_caching"], labels["gpu_memory_utilization"]) == ("True", "0.9")
    assert (labels["cache_dtype"], labels["num_gpu_blocks_override"]) == ("auto", "None")


def test_length_buckets_reach_as_far_as_the_model(seen: Reading) -> None:
    metrics = Metrics("m")
    scene = Scene(metrics)
    info = engine_info()
    info.max_model_len = 100_000
    metrics.engine_started(info)
    assert bounds(scene.read(), "vllm:request_prompt_tokens")[-2] == 100_000


@pytest.mark.parametrize("name", TGI)
def test_names_of_tgi(seen: Reading, name: str) -> None:
    assert seen.kinds[name] == TGI[name]
    assert f"# TYPE {name} {TGI[name]}\n" in seen.text
    sample = f"{name}_count" if TGI[name] == "histogram" else name
    found = [labels for labels, _ in seen.all(sample)]
    assert found
    assert all("model_name" not in labels for labels in found)
    if TGI[name] == "histogram" and name.endswith("_duration"):
        duration = [0.0001 * 1.5**power for power in range(1, 36)] + [float("inf")]
        assert bounds(seen, name, **found[0]) == pytest.approx(duration)


def test_labels_of_tgi(seen: Reading) -> None:
    assert set(seen.by("tgi_request_failure", "err")) >= {
        "validation",
        "overloaded",
        "incomplete",
        "dropped",
        "template",
    }
    assert set(seen.by("tgi_batch_inference_count", "method")) == {"prefill", "decode"}
    assert set(seen.by("tgi_batch_concat", "reason")) == {"backpressure", "chunking", "wait_exceeded"}
    for name in ("inference", "forward", "decode", "filter"):
        assert set(seen.by(f"tgi_batch_{name}_duration_count", "method")) == {"prefill", "decode"}
    assert set(seen.by("tgi_batch_concat_duration_count", "method")) == {"decode"}


def test_tgi_shows_the_same_numbers(seen: Reading) -> None:
    same = {
        "tgi_request_duration": "vllm:e2e_request_latency_seconds",
        "tgi_request_queue_duration": "vllm:request_queue_time_seconds",
        "tgi_request_inference_duration": "vllm:request_inference_time_seconds",
        "tgi_request_mean_time_per_token_duration": "vllm:request_time_per_output_token_seconds",
        "tgi_request_input_length": "vllm:request_prompt_tokens",
        "tgi_request_generated_tokens": "vllm:request_generation_tokens",
        "tgi_request_max_new_tokens": "vllm:request_params_max_tokens",
    }
    for tgi, vllm in same.items():
        assert (seen(f"{tgi}_count"), seen(f"{tgi}_sum")) == (seen(f"{vllm}_count"), seen(f"{vllm}_sum")), tgi
    steps = seen.by("tgi_batch_inference_count", "method")
    assert steps == {"prefill": 1, "decode": 6}
    assert sum(steps.values()) == seen("octavo:steps_total") == seen("octavo:step_phase_seconds_count", phase="execute")
    assert seen.by("tgi_batch_concat", "reason")["chunking"] == 1
    assert seen("tgi_batch_next_size_sum") == 3


def test_every_name_is_described_once_and_the_text_ends_its_lines(seen: Reading) -> None:
    lines = seen.text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    helps = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert len(set(types)) == len(types)
    assert types == helps
    assert all(len(line.split(maxsplit=3)) == 4 for line in lines if line.startswith("# HELP"))
    assert seen.text.endswith("\n")


def test_the_page_of_names_lists_what_is_exported_and_nothing_else(seen: Reading) -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    listed = set(re.findall(r"`((?:vllm:|tgi_|octavo:|http_)\w+)`", page))
    exported = set(re.findall(r"^# TYPE ((?:vllm:|tgi_|octavo:|http_)\w+) ", seen.text, re.M))
    # The server adds this one; the others are one name by its prefix in a sentence.
    assert listed - exported == {"octavo:open_connections"}
    assert exported - listed == set()
