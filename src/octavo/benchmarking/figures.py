"""The figures of a run, made of what became of its requests: under the keys of ``vllm bench serve`` and octavo's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.benchmarking.answers import Answer

__all__ = ["detailed", "is_good", "percentile_word", "request_values", "summarise"]


def summarise(
    answers: Sequence[Answer],
    duration: float,
    *,
    percentiles: Sequence[float] = (99.0,),
    metrics: Sequence[str] = ("ttft", "tpot", "itl"),
    limits: Mapping[str, float] | None = None,
    per_token: bool = True,
    num_devices: int = 1,
) -> dict[str, Any]:
    """The figures of a run that took ``duration`` seconds; ``limits`` are those of a good request, in milliseconds.

    Rates are a second, lengths in tokens, latencies in milliseconds. Failed requests count as failed and nowhere else.
    """
    good = [answer for answer in answers if answer.ok]
    total_in = sum(answer.input_tokens for answer in good)
    total_out = sum(answer.tokens for answer in good)
    values = request_values(good, per_token=per_token)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / duration,
        "request_goodput": sum(is_good(answer, limits) for answer in good) / duration if limits else None,
        "output_throughput": total_out / duration,
        "total_token_throughput": (total_in + total_out) / duration,
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": _peak_concurrency(good),
    }
    for metric in metrics:
        figures |= _spread(metric, values[metric], percentiles)
    tpots = values["tpot"]
    figures |= {
        "per_user_output_throughput": _mean([one.tokens / one.latency for one in good if one.latency > 0]),
        "per_user_output_speed": 1.0 / _mean(tpots) if tpots and _mean(tpots) > 0 else 0.0,
        "per_device_output_throughput": total_out / duration / num_devices,
    }
    counted = [one.server_input_tokens for one in good if one.server_input_tokens is not None]
    if len(counted) == len(good) and good:
        figures["server_input_tokens"] = sum(counted)
    cached = [one.cached_tokens for one in good if one.cached_tokens is not None]
    if cached:
        figures["cached_input_tokens"] = sum(cached)
    if any(one.queued > 0.001 for one in good):
        figures |= _spread("client_queue", [one.queued for one in good], percentiles)
    return figures


def request_values(good: Sequence[Answer], *, per_token: bool = True) -> dict[str, list[float]]:
    """Seconds, by metric: one value a request, for ITL one a token or event, pooled."""
    return {
        "ttft": [answer.ttft for answer in good],
        "tpot": [tpot for answer in good if (tpot := answer.tpot) is not None],
        "itl": [gap for answer in good for gap in answer.gaps(per_token=per_token)],
        "e2el": [answer.latency for answer in good],
    }


def is_good(answer: Answer, limits: Mapping[str, float] | None) -> bool:
    """Whether a completed request kept every limit; an answer of one token has a TPOT of 0."""
    measured = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.latency}
    return all(measured[name] * 1000 <= limit for name, limit in (limits or {}).items())


def detailed(answers: Sequence[Answer], *, per_token: bool = True) -> dict[str, list[Any]]:
    """What happened to each request, under vLLM's keys; times in seconds."""
    return {
        "input_lens": [answer.input_tokens for answer in answers],
        "output_lens": [answer.tokens if answer.ok else 0 for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.gaps(per_token=per_token) for answer in answers],
        "start_times": [answer.sent for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "chunk_tokens": [[mark.tokens for mark in answer.marks] for answer in answers],
        "client_queue_times": [answer.queued for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def percentile_word(percentile: float) -> str:
    """99.0 as 99, 99.9 as it is: how vLLM names its keys."""
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds if len(seconds) else [0.0]) * 1000
    found = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return found | {
        f"p{percentile_word(share)}_{name}_ms": float(np.percentile(values, share)) for share in percentiles
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _peak_rate(good: Sequence[Answer]) -> float:
    """Output tokens in the best of the seconds that follow each other from the first request on."""
    if not good:
        return 0.0
    began = min(answer.sent for answer in good)
    seconds: dict[int, int] = {}
    for answer in good:
        for mark in answer.marks:
            second = math.floor(mark.time - began)
            seconds[second] = seconds.get(second, 0) + (mark.tokens or 0)
    return float(max(seconds.values(), default=0))


def _peak_concurrency(good: Sequence[Answer]) -> int:
    """Most requests in flight at one time; one that ends when another begins is gone before it."""
    changes = [(answer.sent, 1) for answer in good] + [(answer.ended, -1) for answer in good]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak
