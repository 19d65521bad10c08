"""The figures of a run as the block of text ``vllm bench serve`` prints, with TensorRT-LLM's and octavo's lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.benchmarking.figures import percentile_word

__all__ = ["result_text"]

_WIDTH = 50
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def result_text(result: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The block for one result of ``summarise`` with the settings of its run."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [_line("Successful requests:", result["completed"]), _line("Failed requests:", result["failed"])]
    if result.get("max_concurrency") is not None:
        lines.append(_line("Maximum request concurrency:", result["max_concurrency"]))
    rate = result.get("request_rate", math.inf)
    if not isinstance(rate, str) and not math.isinf(rate):
        lines.append(_line("Request rate configured (RPS):", rate))
    lines += [
        _line("Benchmark duration (s):", result["duration"]),
        _line("Total input tokens:", result["total_input_tokens"]),
        _line("Total generated tokens:", result["total_output_tokens"]),
        _line("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result.get("request_goodput") is not None:
        lines.append(_line("Request goodput (req/s):", result["request_goodput"]))
    lines += [
        _line("Output token throughput (tok/s):", result["output_throughput"]),
        _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        _line("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        _line("Total token throughput (tok/s):", result["total_token_throughput"]),
        _line("Per user output throughput (tps/user):", result["per_user_output_throughput"]),
        _line("Per user output speed [1/TPOT] (tps/user):", result["per_user_output_speed"]),
        _line("Per device output throughput (tok/s):", result["per_device_output_throughput"]),
    ]
    lines += _probes(result)
    for metric in metrics:
        lines += _section(metric, result, percentiles)
    lines += _speculation(result.get("speculation"))
    if "client_cpu_s" in result:
        lines += [
            _head("This client"),
            _line("CPU per output token (us):", result["client_cpu_us_per_token"]),
            _line("CPU of one core (%):", 100 * result["client_cpu_share"]),
        ]
    return "\n".join([*lines, "=" * _WIDTH])


def _line(title: str, value: Any) -> str:
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value!s:<10}"
    return f"{title:<40} {shown}".rstrip()


def _head(title: str) -> str:
    return f"{title:-^{_WIDTH}}"


def _section(metric: str, result: Mapping[str, Any], percentiles: Sequence[float]) -> list[str]:
    name = metric.upper()
    lines = [
        _head(_TITLES[metric]),
        _line(f"Mean {name} (ms):", result[f"mean_{metric}_ms"]),
        _line(f"Median {name} (ms):", result[f"median_{metric}_ms"]),
    ]
    for share in percentiles:
        word = percentile_word(share)
        lines.append(_line(f"P{word} {name} (ms):", result[f"p{word}_{metric}_ms"]))
    return lines


def _probes(result: Mapping[str, Any]) -> list[str]:
    if "probe_completed" not in result:
        return []
    return [
        _head("Probe Requests"),
        _line("Successful probes:", result["probe_completed"]),
        _line("Failed probes:", result["probe_failed"]),
        _line("Median probe E2EL (ms):", result["probe_median_e2el_ms"]),
        _line("P99 probe E2EL (ms):", result["probe_p99_e2el_ms"]),
        _line("Max probe E2EL (ms):", result["probe_max_e2el_ms"]),
    ]


def _speculation(figures: Mapping[str, Any] | None) -> list[str]:
    if not figures:
        return []
    lines = [
        _head("Speculative Decoding"),
        _line("Acceptance rate (%):", figures["acceptance_rate"]),
        _line("Acceptance length:", figures["acceptance_length"]),
        _line("Drafts:", figures["num_drafts"]),
        _line("Draft tokens:", figures["draft_tokens"]),
        _line("Accepted tokens:", figures["accepted_tokens"]),
    ]
    if figures["per_position_acceptance_rates"]:
        lines.append("Per-position acceptance (%):")
        lines += [
            _line(f"  Position {place}:", 100 * rate)
            for place, rate in enumerate(figures["per_position_acceptance_rates"])
        ]
    return lines
